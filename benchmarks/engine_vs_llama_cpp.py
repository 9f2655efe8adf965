"""Our kernels against llama.cpp: the same GGUF file, the same number of threads, taken in turns.

    python benchmarks/engine_vs_llama_cpp.py [--quick] [--threads N] [--llama-cpp DIR] [--json FILE]

Each round measures every column with our runner (in this process, pinned to as many cores as threads), with llama.cpp on the
file as it is, and with llama.cpp on the same weights as float32; the medians of the rounds count. The ratio is ours over the
better of the two. ``llama-bench`` and ``llama-batched-bench`` measure llama.cpp, with their defaults (chunks of 512, float16
K/V); our prefill goes in the engine's chunks of 256. Decode columns: 64 steps from that context on. Ours has int8 activations
unless ``--activations`` says otherwise, as llama.cpp has with quantised weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import PAGE_SIZE, Bench, add_model_options
from llama_cpp import LlamaCpp, add_option, find_or_build
from roofline import Arithmetic, Machine, measure_machine, step_need

from microserving.model_files import ResolvedModel, open_model

ROUNDS = 5
OURS, Q4, F32 = "ours", "llama.cpp", "llama.cpp F32"


@dataclass(frozen=True)
class Column:
    """what: "prefill" of ``size`` tokens, or "decode" of ``size`` sequences, ``steps`` times from ``position`` on."""

    name: str
    what: str
    size: int
    position: int = 0
    steps: int = 1

    @property
    def tokens(self) -> int:
        return self.size * self.steps


def columns(quick: bool) -> list[Column]:
    steps, batch_context = (16, 64) if quick else (64, 512)
    return [
        Column("prefill_512", "prefill", 512),
        Column("prefill_2048", "prefill", 2048),
        Column("decode_b1_ctx64", "decode", 1, 64, steps),
        Column("decode_b1_ctx1024", "decode", 1, 1024, steps),
        Column("decode_b8", "decode", 8, batch_context, steps),
    ]


def our_speed(bench: Bench, column: Column) -> float:
    """Tokens per second of one pass; a chunk or a step before it wakes the threads."""
    if column.what == "prefill":
        steps = bench.prefill_steps(column.size)
        bench.runner.run(steps[0])
    else:
        steps = [bench.decode_step(column.size, column.position + i) for i in range(column.steps)]
        bench.runner.run(steps[0])
    begin = time.perf_counter()
    for step in steps:
        bench.runner.run(step)
    return column.tokens / (time.perf_counter() - begin)


def their_speed(llama: LlamaCpp, gguf: Path, column: Column, threads: int, warm: bool) -> float:
    if column.what == "prefill":
        return llama.prefill(gguf, column.size, threads, warm=warm)
    if column.size == 1:
        return llama.decode(gguf, column.position, column.steps, threads, warm=warm)
    return llama.decode_batch(gguf, column.size, column.position, column.steps, threads)


Speeds = dict[str, dict[str, list[float]]]
"""Column -> side -> tokens per second of each round."""


def measure(wanted: Sequence[Column], sides: Mapping[str, Callable[[Column], float]], rounds: int) -> Speeds:
    speeds: Speeds = {column.name: {side: [] for side in sides} for column in wanted}
    for done in range(rounds):
        for column in wanted:
            for side, measure_side in sides.items():
                speeds[column.name][side].append(measure_side(column))
        print(f"round {done + 1} of {rounds}", file=sys.stderr, flush=True)
    return speeds


def share_of_limit(
    model: ResolvedModel, machine: Machine, column: Column, side: str, speed: float, kind: Arithmetic
) -> float:
    """Measured speed over what the roofline allows for that arithmetic and those weights."""
    dense = side == F32
    if column.what == "prefill":
        need = step_need(
            model.weights, rows=column.size, context=column.size / 2, logit_rows=1, sequences=1, dense=dense
        )
        least = need.seconds(machine, kind)
    else:
        context = column.position + column.steps / 2
        need = step_need(
            model.weights,
            rows=column.size,
            context=context,
            logit_rows=column.size,
            sequences=column.size,
            dense=dense,
        )
        least = column.steps * need.seconds(machine, kind)
    return speed * least / column.tokens


def report(
    model: ResolvedModel, machine: Machine, wanted: Sequence[Column], speeds: Speeds, ours_kind: Arithmetic
) -> dict[str, object]:
    """Prints the tables; gives what ``--json`` keeps."""
    quantised: Arithmetic = "int8" if "int8" in machine.peaks else "float32"
    kinds: dict[str, Arithmetic] = {OURS: ours_kind, Q4: quantised, F32: "float32"}
    median = {
        name: {side: statistics.median(values) for side, values in found.items()}
        for name, found in speeds.items()
    }
    ratio, spread, limit = {}, {}, {}
    print(f"{'tok/s (median)':20s}{OURS:>12s}{Q4:>12s}{F32:>15s}   ratio (rounds)     share of the limit")
    for column in wanted:
        found, rounds = median[column.name], speeds[column.name]
        ratio[column.name] = found[OURS] / max(found[Q4], found[F32])
        each = [a / max(b, c) for a, b, c in zip(rounds[OURS], rounds[Q4], rounds[F32], strict=True)]
        spread[column.name] = [min(each), max(each)]
        limit[column.name] = {
            side: share_of_limit(model, machine, column, side, found[side], kinds[side]) for side in found
        }
        shares = " / ".join(f"{100 * share:.0f} %" for share in limit[column.name].values())
        print(
            f"{column.name:20s}{found[OURS]:12.1f}{found[Q4]:12.1f}{found[F32]:15.1f}"
            f"   {ratio[column.name]:.2f} ({min(each):.2f} to {max(each):.2f})   {shares}"
        )
    return {"ratio": ratio, "ratio_of_rounds": spread, "tokens_per_s": median, "share_of_limit": limit}


def print_limits(model: ResolvedModel, machine: Machine) -> None:
    peaks = ", ".join(f"{kind} {peak / 1e9:.0f}" for kind, peak in machine.peaks.items())
    print(f"memory {machine.bandwidth / 1e9:.1f} GB/s; multiply-adds per second (1e9): {peaks}")
    for context in (64, 1024):
        need = step_need(model.weights, rows=1, context=context, logit_rows=1)
        dense = step_need(model.weights, rows=1, context=context, logit_rows=1, dense=True)
        print(
            f"a token at context {context} reads {need.nbytes / 1e6:.1f} MB ({dense.nbytes / 1e6:.0f} MB as float32)"
            f" and needs {need.multiply_adds / 1e6:.0f} million multiply-adds"
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add_model_options(parser)
    add_option(parser)
    parser.set_defaults(activations="int8")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="one short round, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    llama, model, threads = find_or_build(options.llama_cpp), open_model(options.model), options.threads
    gguf = model.source_path
    if gguf.suffix != ".gguf":
        sys.exit(f"{gguf}: llama.cpp needs a GGUF file")
    dense = llama.f32_of(gguf)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # llama.cpp's processes inherit it
    load = os.getloadavg()[0]
    wanted, warm = columns(options.quick), not options.quick
    bench = Bench(
        model, options, max(2048, 8 * (512 + 64)) // PAGE_SIZE
    )  # the batch's contexts do not overlap
    machine = measure_machine(threads)
    print(f"{model.name}, threads {threads}, activations {bench.activations}, load average before {load:.1f}")
    if load > 0.5:
        print(
            "the machine is busy: llama.cpp's threads spin until all are done, and suffer from neighbours more than ours"
        )
    print_limits(model, machine)
    sides: dict[str, Callable[[Column], float]] = {
        OURS: lambda column: our_speed(bench, column),
        Q4: lambda column: their_speed(llama, gguf, column, threads, warm),
        F32: lambda column: their_speed(llama, dense, column, threads, warm),
    }
    speeds = measure(wanted, sides, options.rounds or (1 if options.quick else ROUNDS))
    found = report(model, machine, wanted, speeds, bench.activations)
    if options.json is not None:
        head = {
            "model": model.name,
            "threads": threads,
            "activations": bench.activations,
            "load_average": load,
        }
        options.json.write_text(json.dumps({**head, **found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
