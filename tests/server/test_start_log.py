"""What the log tells about how long a start takes."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time

import pytest

from microserving.server.run import logged, process_age_s


def test_each_stage_is_logged_once_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, float]] = []
    report = logged(lambda stage, fraction: seen.append((stage, fraction)))
    calls = [("weights", 0.0), ("weights", 0.5), ("weights", 1.0), ("load", 0.0), ("load", 1.0)]
    with caplog.at_level(logging.DEBUG, "microserving.server.run"):
        for stage, fraction in calls:
            report(stage, fraction)
    assert seen == calls
    assert [re.sub(r"\d+\.\d\d", "N", record.message) for record in caplog.records] == [
        "start: weights from N s on",
        "start: load from N s on",
    ]


def test_the_age_counts_from_the_start_of_the_process() -> None:
    """Bounded from both sides by clocks read outside and inside of a process."""
    code = "from microserving.server.run import process_age_s; print(process_age_s())"
    before = time.monotonic()
    age = float(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    )
    assert 0.0 < age <= time.monotonic() - before + 0.02  # ticks of 10 ms
    assert process_age_s() > time.monotonic() - before
