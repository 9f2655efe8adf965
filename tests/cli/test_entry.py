"""The first moments of the command, before there is a wall that catches anything."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

INTERRUPTED_WHILE_IMPORTING = """
import importlib.abc, os, runpy, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "microserving.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
{before}
sys.meta_path.insert(0, Interrupt())
sys.argv = ["microserving", "--version"]
runpy.run_module("microserving", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("before", "status"),
    [
        # Said outright: a shell that starts the tests in the background has them ignore SIGINT.
        ("signal.signal(signal.SIGINT, signal.default_int_handler)", -signal.SIGINT),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)", 0),
    ],
    ids=["usual", "ignored"],
)
def test_ctrl_c_while_the_command_is_imported_is_quiet(before: str, status: int) -> None:
    code = INTERRUPTED_WHILE_IMPORTING.format(before=before)
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (status, "")
