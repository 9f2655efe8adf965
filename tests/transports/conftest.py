"""A world of transports of every kind, for the conformance suite; modules about one kind have a ``world`` of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from microserving.transports import TRANSPORTS

from .conformance_harness import RecordingObserver, World


@pytest.fixture(params=sorted(TRANSPORTS))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = World(request.param, tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def observer() -> RecordingObserver:
    return RecordingObserver()
