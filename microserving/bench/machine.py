"""Where and with what something was measured."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import microserving

_PACKAGES = ("apache-tvm", "numpy", "uvicorn", "httptools", "pydantic", "tokenizers")


def machine() -> dict[str, Any]:
    """The processor, its cores that this process may use, the memory, and how busy it is at this moment."""
    return {
        "processor": _processor(),
        "cores": sorted(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "load_average": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that count."""
    found = {"python": sys.version.split()[0], "microserving": microserving.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
