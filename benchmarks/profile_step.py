"""Where the time of a step goes: matrix products, attention, head, other kernels, TVM's VM, Python.

    python benchmarks/profile_step.py [--quick] [--threads N] [--json FILE]

Two cases: a decode of one sequence, and a prefill of 512 tokens in one chunk. What a step costs outside of kernels is timed on
the same graph with kernels that return at once: all of that step is Python and the VM, the checks of a kernel's arguments
included. Steps with and without kernels take turns, and medians count. What kernels take is the rest; it is shared out as a
listener in the VM sees them, whose own cost is not small but much the same for each call. One thing the figures miss: the VM's
memory stays in the caches while no kernel reads weights.

With one thread the clock is that thread's CPU time, which neighbours disturb least: use ``--threads 1`` where the machine is not
quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine import PAGE_SIZE, Bench, add_model_options
from tvm import tirx

from microserving.engine.compiler.compile import compile_graph
from microserving.engine.kernels.isa import detect_isa
from microserving.engine.model_runner import TVMModelRunner
from microserving.engine.models.base import export
from microserving.engine.models.registry import model_class
from microserving.engine.models.spec import ModelSpec
from microserving.engine.runner import RunnerChunk
from microserving.engine.tvm_runtime import load_objects
from microserving.engine.weights import tile_kind
from microserving.model_files import ModelConfig, ResolvedModel, open_model

Clock = Callable[[], int]
PARTS = ("matmul", "attention", "lm_head", "elementwise", "vm", "python")
CONTEXT = 128
PREFILL = 512


@dataclass(frozen=True)
class Profile:
    """ms: of a whole step. parts: the share of each of PARTS. kernels: milliseconds of each kernel, as the listener saw it."""

    case: str
    ms: float
    parts: dict[str, float]
    kernels: dict[str, float]

    @property
    def overhead(self) -> float:
        """The share of Python and the VM."""
        return self.parts["vm"] + self.parts["python"]


class KernelTimes:
    """Sums up the time of each kernel of a step. A listener for ``TVMModelRunner.instrument``.

    Being called costs microseconds, which count as the kernel's. The quickest call of all, to a part of the VM that does
    next to nothing, shows how many; so much is taken off each call.
    """

    def __init__(self, clock: Clock) -> None:
        self._spent: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._clock, self._begin, self._least = clock, 0, 1 << 62

    def __call__(self, name: str, before: bool) -> None:
        if before:
            self._begin = self._clock()
            return
        ns = self._clock() - self._begin
        self._spent[name] += ns
        self._calls[name] += 1
        self._least = min(self._least, ns)

    @property
    def ns(self) -> dict[str, int]:
        return {name: max(ns - self._calls[name] * self._least, 0) for name, ns in self._spent.items()}


def is_of_vm(kernel: str) -> bool:
    return kernel.startswith("vm.")


def part_of(kernel: str, config: ModelConfig) -> str:
    if "attention" in kernel:
        return "attention"
    if "matmul" in kernel:
        return "lm_head" if f"_{config.vocab_size}_" in kernel else "matmul"
    return "elementwise"


def without_kernels(bench: Bench, model: ResolvedModel) -> TVMModelRunner:
    """The runner of ``bench`` with kernels that return at once."""
    config, isa, weights, runner = model.config, detect_isa(), model.weights, bench.runner
    definition = model_class(config.architecture)
    stacked = {
        name: [weights.weight(source) for source in sources]
        for name, sources in definition.parameters_of(config).items()
    }
    kinds = {name: tile_kind(parts) for name, parts in stacked.items() if len(parts[0].shape) == 2}
    spec = ModelSpec(config, bench.layout, isa, kinds)
    module, _ = export(definition(spec), spec)
    for name, function in list(module.functions.items()):
        if isinstance(function, tirx.PrimFunc):
            module[name] = function.with_body(tirx.Evaluate(0))
    code = load_objects(compile_graph(module, isa))
    return TVMModelRunner(code, runner._parameters, config, bench.layout, runner._pool, bench.threads)


def step_ms(runner: TVMModelRunner, step: list[RunnerChunk], clock: Clock) -> tuple[float, float]:
    """Milliseconds of (a whole step, the VM's call in it)."""
    inner, call = [], runner._step

    def timed(*arguments: object) -> object:
        begin = clock()
        result = call(*arguments)
        inner.append(clock() - begin)
        return result

    runner._step = timed
    begin = clock()
    runner.run(step)
    whole = clock() - begin
    runner._step = call
    return whole / 1e6, inner[0] / 1e6


def kernel_ms(bench: Bench, step: list[RunnerChunk], repeats: int, clock: Clock) -> dict[str, float]:
    """Milliseconds of each kernel, all its calls together, in the repeat that spent the least in kernels."""
    found: list[dict[str, int]] = []
    for _ in range(repeats):
        times = KernelTimes(clock)
        bench.runner.instrument(times)
        bench.runner.run(step)
        found.append(times.ns)
    best = min(found, key=lambda ns: sum(spent for name, spent in ns.items() if not is_of_vm(name)))
    return {name: spent / 1e6 for name, spent in best.items() if not is_of_vm(name)}


def profiles(bench: Bench, model: ResolvedModel, quick: bool, clock: Clock) -> list[Profile]:
    prompt = [chunk for step in bench.prefill_steps(PREFILL) for chunk in step]
    tokens = [token for chunk in prompt for token in chunk.token_ids]
    cases = {
        f"decode of 1 at {CONTEXT}": (bench.decode_step(1, CONTEXT), 40 if quick else 300),
        f"prefill of {PREFILL}": ([RunnerChunk(tokens, 0, prompt[0].pages, True)], 3 if quick else 7),
    }
    empty = without_kernels(bench, model)
    timed: dict[str, list[tuple[float, float, float]]] = {}
    for name, (step, repeats) in cases.items():  # before any listener: one that was set stays
        rounds = [
            (step_ms(bench.runner, step, clock), step_ms(empty, step, clock)) for _ in range(repeats + 2)
        ]
        timed[name] = [(whole, *outside) for (whole, _), outside in rounds[2:]]
    return [
        make_profile(name, model.config, timed[name], kernel_ms(bench, step, min(repeats, 20), clock))
        for name, (step, repeats) in cases.items()
    ]


def make_profile(
    name: str, config: ModelConfig, rounds: list[tuple[float, float, float]], kernels: dict[str, float]
) -> Profile:
    """rounds: milliseconds of (a step, a step without kernels, the VM's call in the latter)."""
    whole, outside, inner = (statistics.median(values) for values in zip(*rounds, strict=True))
    spent: Counter[str] = Counter()
    for kernel, ms in kernels.items():
        spent[part_of(kernel, config)] += ms
    in_kernels, seen = 1 - outside / whole, sum(spent.values())
    parts = {part: in_kernels * spent[part] / seen for part in PARTS}
    return Profile(name, whole, {**parts, "vm": inner / whole, "python": (outside - inner) / whole}, kernels)


def print_profile(profile: Profile) -> None:
    shares = ", ".join(f"{part} {100 * share:.1f} %" for part, share in profile.parts.items())
    print(f"{profile.case}: {profile.ms:.2f} ms; {shares}")
    print(f"  Python and VM together: {100 * profile.overhead:.1f} %, {profile.overhead * profile.ms:.2f} ms")
    for kernel, ms in sorted(profile.kernels.items(), key=lambda item: -item[1])[:12]:
        print(f"  {kernel:40s}{ms:9.3f} ms")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add_model_options(parser)
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    model = open_model(options.model)
    bench = Bench(model, options, PREFILL // PAGE_SIZE + 1)
    print(f"{model.name}, threads {options.threads}, activations {bench.activations}")
    clock = time.thread_time_ns if options.threads == 1 else time.perf_counter_ns
    found = profiles(bench, model, options.quick, clock)
    for profile in found:
        print_profile(profile)
    if options.json is not None:
        results = [{**asdict(profile), "python_and_vm": profile.overhead} for profile in found]
        head = {"model": model.name, "threads": options.threads, "activations": bench.activations}
        options.json.write_text(json.dumps({**head, "results": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
