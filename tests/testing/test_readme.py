"""What README says of the kit is so: the test in it passes, and `check --faults` prints what is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = (ROOT / "README.md").read_text().partition("## Write a router program")[2].partition("\n## ")[0]
FIRST, SECTION = CHAPTER.split("### What it does when something fails")


def in_folder(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_example_runs(tmp_path: Path) -> None:
    code = FIRST.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "mine.py").write_text(
        code.replace("received = decode.prep_recv", "received = await decode.prep_recv")
    )
    (tmp_path / "test_mine.py").write_text(SECTION.partition("```python\n")[2].partition("```")[0])
    tested = in_folder(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
    assert tested.returncode == 0, tested.stdout
    checked = in_folder(tmp_path, "microserving", "program", "check", "mine.py", "--faults")
    shown = SECTION.partition("--faults\n")[2].partition("```")[0]
    assert (checked.returncode, checked.stderr) == (0, "")
    assert places(checked.stdout) == places(shown)


def places(report: str) -> list[str]:
    """The awaits in the table: how many runs there are is nobody's promise."""
    return re.findall(r"^  (\S+ +[a-z_ ]+?) +\d+ runs   ok$", report, re.MULTILINE)
