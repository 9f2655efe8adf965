"""How long an engine takes from the start of its process until it takes requests, with everything cached.

    python benchmarks/start.py [--quick] [--model NAME] [--json FILE]

The first start is not counted: it fills the caches. Wall time is what a person waits; CPU time (of the process, all threads)
hardly depends on how busy the machine is. The log of an engine tells the stages (``microserving serve --verbose``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

GOAL_S = 4.0
_KV_CACHE_BYTES = 2**25


@dataclass(frozen=True)
class Start:
    """Seconds until the engine was ready."""

    wall_s: float
    cpu_s: float


def start(model: str, runtime_dir: str) -> Start:
    """One engine, ended when it is ready. Raises RuntimeError when it does not become so."""
    options = [
        "--model", model, "--port", "0", "--runtime-dir", runtime_dir, "--kv-cache-bytes", str(_KV_CACHE_BYTES)
    ]  # fmt: skip
    command = [sys.executable, "-m", "microserving", "serve", *options]
    begin = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if " ready at " in line:
                    return Start(time.perf_counter() - begin, _cpu_s(process.pid))
        finally:
            process.terminate()
            process.communicate()
    raise RuntimeError("the engine did not start:\n" + "".join(lines[-5:]))


def _cpu_s(pid: int) -> float:
    """User and system time of a process: fields 14 and 15 of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three starts instead of ten")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="msv-") as runtime_dir:
        start(options.model, runtime_dir)
        found = [start(options.model, runtime_dir) for _ in range(3 if options.quick else 10)]
    median = Start(
        statistics.median(one.wall_s for one in found), statistics.median(one.cpu_s for one in found)
    )
    sys.stdout.write(
        f"ready after {median.wall_s:.2f} s (goal {GOAL_S:.0f} s), {median.cpu_s:.2f} s of CPU time;"
        f" median of {len(found)}, load {os.getloadavg()[0]:.1f}\n"
    )
    if options.json is not None:
        figures = {"median": asdict(median), "starts": [asdict(one) for one in found]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
