"""How fast this machine computes a model: prefill and decode in tokens per second, without HTTP or a scheduler.

    python benchmarks/engine.py [--quick] [--scaling] [--threads N] [--model M] [--json FILE]

Prefill: one prompt in chunks of 256, as the engine cuts it. Decode: one token for each of b sequences that stand at the same
position. The best of several runs counts: on a shared machine the others measure the neighbours.
"""

from __future__ import annotations

import argparse
import json
import mmap
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from microserving.engine.config import EngineConfig, available_cpus
from microserving.engine.kernels.isa import detect_isa
from microserving.engine.model_runner import TVMModelRunner
from microserving.engine.runner import RunnerChunk
from microserving.model_files import DEFAULT_MODEL, ResolvedModel, open_model
from microserving.protocol.kv_layout import Activations, KVLayout

PAGE_SIZE = 16
CHUNK = 256
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)


@dataclass(frozen=True)
class Measurement:
    """what: "prefill" or "decode". size: prompt tokens, or rows of a batch. position: tokens already in the KV cache."""

    what: str
    size: int
    position: int
    ms: float
    tokens_per_s: float


class Bench:
    """A runner with a pool that is large enough, and prompts of random tokens. options: those of ``add_model_options``."""

    def __init__(self, model: ResolvedModel, options: argparse.Namespace, pages: int) -> None:
        config = model.config
        self.activations: Activations = options.activations or EngineConfig().activations
        self.threads: int = options.threads
        self.layout = layout = KVLayout(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            PAGE_SIZE,
            options.kv_dtype,
            activations=self.activations,
        )
        memory = np.frombuffer(mmap.mmap(-1, layout.bytes_per_page * pages), np.uint8)
        begin = time.perf_counter()
        self.runner = TVMModelRunner.create(
            model.weights, layout=layout, total_pages=pages, pool_memory=memory, threads=options.threads
        )
        self.load_s = time.perf_counter() - begin
        self._pages = np.random.default_rng(0).permutation(pages).tolist()
        self._tokens = np.random.default_rng(1).integers(0, config.vocab_size, 1 << 16).tolist()

    def prefill_steps(self, length: int) -> list[list[RunnerChunk]]:
        """One prompt, cut as the engine cuts it."""
        return [
            [RunnerChunk(self._tokens[at : min(at + CHUNK, length)], at, self._pages, at + CHUNK >= length)]
            for at in range(0, length, CHUNK)
        ]

    def decode_step(self, batch: int, position: int) -> list[RunnerChunk]:
        """One token for each of ``batch`` sequences; each owns its pages as far as the pool has enough of them."""
        needed = position // PAGE_SIZE + 1
        starts = [row * needed % max(len(self._pages) - needed + 1, 1) for row in range(batch)]
        return [
            RunnerChunk([self._tokens[row]], position, self._pages[start : start + needed], True)
            for row, start in enumerate(starts)
        ]

    def prefill(self, length: int, repeats: int) -> Measurement:
        steps = self.prefill_steps(length)
        ms = best_ms(lambda: [self.runner.run(step) for step in steps], repeats)
        return Measurement("prefill", length, 0, ms, length / ms * 1e3)

    def decode(self, batch: int, position: int, repeats: int) -> Measurement:
        step = self.decode_step(batch, position)
        ms = best_ms(lambda: self.runner.run(step), repeats)
        return Measurement("decode", batch, position, ms, batch / ms * 1e3)


def best_ms(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def measure(bench: Bench, quick: bool) -> list[Measurement]:
    lengths, batches, positions = (
        ([512], [1, 4], [128]) if quick else ([128, 512, 2048], [1, 4, 8, 16], [128, 1024])
    )
    found = [bench.prefill(length, 2 if quick else 4) for length in lengths]
    for position in positions:
        found += [bench.decode(batch, position, 10 if quick else 30) for batch in batches]
    return found


def measure_scaling(bench: Bench, quick: bool) -> list[Measurement]:
    """What a longer context costs: prefills of 1024, 2048 and 4096 tokens; decodes at the same positions."""
    lengths = (1024, 2048, 4096)
    found = [bench.prefill(length, 1 if quick else 3) for length in lengths]
    return found + [bench.decode(1, length, 10 if quick else 30) for length in lengths]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What decides how a model is computed."""
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="catalog name, GGUF file or Hugging Face directory"
    )
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument(
        "--activations", choices=ACTIVATIONS, help="default: the engine's, float32; int8 beside llama.cpp"
    )
    parser.add_argument("--kv-dtype", choices=["float16", "float32"], default="float16")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add_model_options(parser)
    parser.add_argument("--scaling", action="store_true", help="only the cost of longer contexts, up to 4096")
    parser.add_argument("--quick", action="store_true", help="a few seconds instead of a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    model = open_model(options.model)
    longest = 4096 if options.scaling else 2048
    bench = Bench(model, options, longest // PAGE_SIZE + 1)
    head = {
        "model": model.name,
        "threads": options.threads,
        "isa": detect_isa().name,
        "activations": bench.activations,
        "kv_dtype": options.kv_dtype,
        "load_s": round(bench.load_s, 2),
    }
    print(", ".join(f"{name} {value}" for name, value in head.items()))
    found = (measure_scaling if options.scaling else measure)(bench, options.quick)
    for item in found:
        where = f"{item.size} tokens" if item.what == "prefill" else f"b={item.size} at {item.position}"
        print(f"{item.what:8s} {where:16s} {item.tokens_per_s:8.1f} tok/s {item.ms:9.2f} ms")
    if options.json is not None:
        options.json.write_text(
            json.dumps({**head, "results": [asdict(item) for item in found]}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
