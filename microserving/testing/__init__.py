"""A test kit for router programs: every await of a program, with every fault, in virtual time.

In a test file of your own::

    from microserving.testing import assert_program_is_sound

    def test_my_program() -> None:
        assert_program_is_sound("mine.py", settings={"long_prompt": 64})

``check_program`` returns the ``Report`` instead. What runs the program is the router's own dispatcher, with its retries
and clean-ups; only the engines are models (``engines``), and the clock (``virtual_time``). The report names what leaks,
what a client would see, and counters that do not come back: the fault, the await, the line of the program.

Above ``router``; nothing that serves requests imports it.
"""

from __future__ import annotations

from microserving.testing.check import ALL_FAULTS, assert_program_is_sound, check_program
from microserving.testing.engines import EngineSettings
from microserving.testing.faults import WHAT, Fault, Moment
from microserving.testing.report import Finding, Report, Verdict

__all__ = [
    "ALL_FAULTS",
    "WHAT",
    "EngineSettings",
    "Fault",
    "Finding",
    "Moment",
    "Report",
    "Verdict",
    "assert_program_is_sound",
    "check_program",
]
