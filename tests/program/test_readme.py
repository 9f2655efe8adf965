"""What README says of router programs is so: its first program, the mistake in it, and the tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from microserving.policies import POLICIES
from microserving.program import setting_types
from microserving.router.program_loader import load_program, shipped_programs

ROOT = Path(__file__).resolve().parents[2]
CHAPTER = (ROOT / "README.md").read_text().partition("## Write a router program")[2].partition("\n## ")[0]


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "microserving", "program", "check", "mine.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_first_program_has_the_mistake_that_is_told(tmp_path: Path) -> None:
    code = CHAPTER.partition("```python\n")[2].partition("```")[0]
    file = tmp_path / "mine.py"
    file.write_text(code)
    refused = check(tmp_path)
    assert refused.returncode != 0
    told = re.search(r"^microserving: error: \S*(/mine\.py:.*)$", CHAPTER, re.MULTILINE)
    assert told is not None
    assert refused.stderr.strip().endswith(told[1])
    file.write_text(code.replace("received = decode.prep_recv", "received = await decode.prep_recv"))
    good = check(tmp_path)
    assert (good.returncode, good.stdout.strip()) == (0, "mine.py: ok (Mine; long_prompt=256)")
    assert good.stdout.strip() in CHAPTER


def test_every_program_and_every_policy_is_in_the_tables() -> None:
    for name in shipped_programs():
        row = re.search(rf"^\| `{name}` \|.*\| (.*)\|$", CHAPTER, re.MULTILINE)
        assert row is not None, name
        settings = list(setting_types(type(load_program(name).instance)))
        assert not settings or settings[0] in row[1]
    for policy in POLICIES:
        assert f"`{policy}(" in CHAPTER
