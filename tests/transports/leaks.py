"""What a transport may leave behind in this process: open files and mapped pools."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

from .conformance_harness import TIMEOUT_S


def open_fds() -> int:
    gc.collect()  # what earlier tests left in cycles
    return len(os.listdir("/proc/self/fd"))


def fds_come_to(count: int) -> bool:
    """Whether so many are open, at last: a thread that an earlier test left may hold one for a moment."""
    deadline = time.monotonic() + TIMEOUT_S
    while open_fds() != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return open_fds() == count


def pool_maps() -> int:
    return Path("/proc/self/maps").read_text().count("microserving-kv")
