"""One process that tries many damaged inputs: ``python -m tests.fuzz.worker TARGET FIRST COUNT DIRECTORY``.

Its address space may grow by 1 GiB; an input that takes longer than HANG_S ends the process with a traceback, even in
native code. Writes one JSON line before each input and one with its outcome after it.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
import time
from pathlib import Path
from random import Random

from microserving.errors import InvalidRequest, ModelLoadError
from tests.fuzz.targets import TARGETS

HANG_S = 5
MEMORY_BYTES = 2**30
MAX_MESSAGE_CHARS = 2000


def try_one(target: str, seed: int, directory: Path) -> str:
    """``loaded`` or ``refused``; whatever else is raised is a fault."""
    try:
        TARGETS[target](Random(f"{target}-{seed}"), directory)
    except (ModelLoadError, InvalidRequest) as error:
        message = str(error)
        assert message.isprintable(), f"not one line: {message!r}"
        assert len(message) <= MAX_MESSAGE_CHARS, f"{len(message)} characters: {message[:300]}"
        message.encode()
        return "refused"
    return "loaded"


def peak_bytes() -> int:
    """Of this program: what getrusage tells includes what the process had before it became this program."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main(target: str, first: int, count: int, root: Path) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)
    for seed in range(first, first + count):
        directory = root / f"{target}-{seed}"
        directory.mkdir()
        print(json.dumps({"seed": seed}), flush=True)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        started = time.perf_counter()
        outcome = try_one(target, seed, directory)
        seconds = time.perf_counter() - started
        faulthandler.cancel_dump_traceback_later()
        told = {"seed": seed, "outcome": outcome, "seconds": seconds, "peak": peak_bytes()}
        print(json.dumps(told), flush=True)
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
