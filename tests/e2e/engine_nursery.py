"""A process that has imported the engine and forks one for every line it is given: a start costs a fraction of a second.

Each line on its input is a JSON object: ``arguments`` (of the `microserving` command) and ``log`` (a file). It answers
with the engine's pid on a line. When its input ends, or it dies, all engines end.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .processes import REPOSITORY, environment, wait_until

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """SIGKILL, because an engine that was stopped takes no other."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Nursery:
    """Used by one thread at a time."""

    def __init__(self, log: Path) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.engine_nursery"],
                cwd=REPOSITORY,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def start(self, *arguments: str, log: Path) -> int:
        """The pid of a new engine, which is not ready yet."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"arguments": arguments, "log": str(log)})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


def kill(pid: int) -> None:
    """SIGKILL; returns when the process is gone."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10, "gone")


def _engine(arguments: list[str], log: str) -> int:
    _end_with_parent()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    from microserving.cli.main import main

    return main(arguments)


def _serve() -> None:
    import microserving.cli.serve
    import microserving.server.run  # noqa: F401 - what takes the time

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends is reaped by the kernel
    pids: list[int] = []
    for line in iter(sys.stdin.readline, ""):
        order: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = _engine(order["arguments"], order["log"])
            finally:
                os._exit(status)
        pids.append(pid)
        os.write(1, f"{pid}\n".encode())
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
