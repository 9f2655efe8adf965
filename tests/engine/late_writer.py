"""A sending engine as a process of its own, which stops itself (SIGSTOP) between the puts of two layers.

RUNTIME_DIR CACHE_DIR: computes a prompt under lease 1 of engine d0/e1, stops before layer 1's put. Once it is woken it
goes on to the end: "computed", then "arrived" or "refused", as the receiver answers.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from microserving.engine.model_runner import TVMModelRunner
from microserving.engine.runner import RemotePut, RunnerChunk
from microserving.errors import LeaseError
from microserving.transports import Lease, create_transport
from tests.engine.random_weights import QUANTISED, RandomWeights, layout_of, pool_memory, small_config

TOKENS = 50


def main(runtime_dir: Path, cache_dir: Path) -> None:
    weights = RandomWeights(small_config(tied=True, layers=3), QUANTISED)
    layout = layout_of(weights.config, "float16")
    runner = TVMModelRunner.create(
        weights,
        layout=layout,
        total_pages=8,
        pool_memory=pool_memory(layout, 8),
        threads=1,
        cache_dir=cache_dir,
    )
    transport = create_transport("shared_memory", runtime_dir=runtime_dir)
    connection, lease = transport.connect("d0", "e1", 10), Lease("d0", "e1", "request-1", 1)
    guard = connection.begin(lease).result(10)
    puts: list[str] = []

    def listener(kernel: str, about_to_run: bool) -> None:
        if kernel == "put" and about_to_run:
            puts.append(kernel)
            if len(puts) == 2:
                os.kill(os.getpid(), signal.SIGSTOP)

    runner.instrument(listener)
    put = RemotePut(connection.pool, np.arange(TOKENS, dtype=np.int32), guard)
    runner.run([RunnerChunk(list(range(TOKENS)), 0, [3, 1, 6, 2], False, put)])
    print("computed", flush=True)
    try:
        connection.finish(lease, True).result(10)
        print("arrived", flush=True)
    except LeaseError:
        print("refused", flush=True)
    transport.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
