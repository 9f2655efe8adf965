"""Damaged model files: every one loads or is refused in one line; none kills, hangs or fills the process.

``MICROSERVING_FUZZ=1000`` tries that many of each kind instead of a few.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS
from tests.fuzz.worker import MEMORY_BYTES

COUNT = int(os.environ.get("MICROSERVING_FUZZ", "40"))
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120 + 2 * COUNT)
@pytest.mark.case("LD-01", "LD-03", "LD-05", "LD-09", "SC-20", "TK-07")
@pytest.mark.parametrize("target", TARGETS)
def test_damaged_files(target: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.worker", target, "0", str(COUNT), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 0, f"{target}, seed {lines[-1]['seed']}:\n{ran.stderr[-3000:]}"
    done = [line for line in lines if "outcome" in line]
    assert len(done) == COUNT
    assert {line["outcome"] for line in done} == {"loaded", "refused"}, "the damage is neither all nor none"
    assert max(line["peak"] for line in done) < MEMORY_BYTES
