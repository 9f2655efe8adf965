"""One end of a shared-memory hand-off as a process of its own; driven by lines on stdin, answers on stdout.

receiver RUNTIME_DIR ENGINE EPOCH PAGES [MAX_FDS]   "ready", then a line per event; "sum" -> the pool's sum
writer   RUNTIME_DIR ENGINE EPOCH                   begins lease 1 and marks byte 0: "begun"; "finish" -> "finished";
                                                    "put N" marks byte N if the lease word lets it -> "put True"
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from microserving.transports import Lease, create_transport

PAGE_BYTES = 4096


def say(text: str) -> None:
    print(text, flush=True)


class Teller:
    def begin_write(self, lease: Lease) -> bool:
        say(f"begin {lease.lease_id}")
        return True

    def end_write(self, lease: Lease, ok: bool) -> bool:
        say(f"end {lease.lease_id} {ok}")
        return ok


def receiver(runtime_dir: Path, engine_id: str, epoch: str, pages: str, max_fds: str | None = None) -> None:
    transport = create_transport("shared_memory", runtime_dir=runtime_dir)
    memory = transport.allocate(int(pages) * PAGE_BYTES)
    transport.serve(engine_id, epoch, int(pages), Teller())
    if max_fds is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(max_fds), int(max_fds)))
    say("ready")
    for line in sys.stdin:
        if line.strip() == "sum":
            say(f"sum {int(memory.sum())}")
    transport.close()


def writer(runtime_dir: Path, engine_id: str, epoch: str) -> None:
    transport = create_transport("shared_memory", runtime_dir=runtime_dir)
    connection = transport.connect(engine_id, epoch, 10)
    lease = Lease(engine_id, epoch, "request-1", 1)
    guard = connection.begin(lease).result(10)
    pool = connection.pool
    pool.memory[0] = 42
    say("begun")
    for line in sys.stdin:
        if line.strip() == "finish":
            connection.finish(lease, True).result(10)
            say("finished")
        elif line.startswith("put"):
            holds = bool(pool.leases[guard.word] == guard.lease_id)
            if holds:
                pool.memory[int(line.split()[1])] = 42
            say(f"put {holds}")
    transport.close()


if __name__ == "__main__":
    role, directory, *rest = sys.argv[1:]
    {"receiver": receiver, "writer": writer}[role](Path(directory), *rest)
