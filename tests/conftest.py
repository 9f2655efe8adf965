"""What holds for all tests."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # no test depends on how busy the machine is
settings.load_profile("no deadline")
