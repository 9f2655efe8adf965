"""The first code of every process that the launcher starts: tie it to the launcher's life, pin it, run the program.

    python -m microserving.cluster.child [--family] [--cpus 0,1] -m MODULE ARGS...
    python -m microserving.cluster.child [--family] [--cpus 0,1] FILE ARGS...

The launcher holds the other end of our stdin and never writes. When it dies, however it dies, the kernel kills this
process (PR_SET_PDEATHSIG); end of file on stdin covers the moment before that is set. With ``--family`` (a program
that starts processes itself) only end of file counts, since it ends the whole process group and the kernel would not.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def tie_to_parent(family: bool) -> None:
    """Make this process die with the one that started it, and leave Ctrl-C in the terminal to that one.

    Must lead a process group of its own. family: processes that it starts die as well.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux" and not family:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_die_at_end_of_stdin, name="parent-watch", daemon=True).start()


def _die_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Does not return before the program ends. arguments: as in the module's docstring."""
    family = arguments[0] == "--family"
    arguments = arguments[family:]
    if arguments[0] == "--cpus":
        os.sched_setaffinity(0, {int(cpu) for cpu in arguments[1].split(",")})
        arguments = arguments[2:]
    tie_to_parent(family)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
