"""Which pattern wins: data parallel, prefill/decode, and prefill/decode that is balanced, on two cores.

    python benchmarks/patterns.py [--quick] [--workload synthetic|shared-prefix] [--json FILE]

The published run (prompts of 3,000 and outputs of 100 tokens of sonnets, temperature 0.6, top-p 0.9, two GPUs) in small:
prompts of 600 and outputs of 60 tokens, so that a prompt takes about a second of a core as it took a fraction of one of a
GPU; each engine has one core to itself, ``one engine`` has both. The clusters run side by side, but one at a time is asked.
Rates are shares of what the prefill engine of plain 1P1D can take, which is measured first. The second workload
(``shared-prefix``) has the prefix cache on; each run begins with an empty one.

The knee is where plain 1P1D stops to keep up: the figures are of the last rate before its mean JCT is more than three
times that at the lowest rate (``--quick``: of 0.85 of what it can take).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from microserving.bench.arrivals import Poisson
from microserving.bench.charts import panel
from microserving.bench.clusters import program_of
from microserving.bench.experiment import ExperimentSettings
from microserving.bench.lengths import Lengths
from microserving.bench.load import LoadSettings
from microserving.bench.page import page
from microserving.bench.report import Report, latency, write_report, write_text
from microserving.bench.suite import Candidate, Plan, run_suite, serving
from microserving.bench.table import table
from microserving.bench.targets import Target
from microserving.bench.texts import Prose
from microserving.bench.workloads import Sampling, SharedPrefix, Style, Synthetic, Workload
from microserving.cluster.config import ClusterConfig, parse_cluster_config
from microserving.engine.config import EngineConfig
from microserving.errors import MicroservingError
from microserving.model_files import DEFAULT_MODEL, open_model
from microserving.observability.console import Console
from microserving.tokenizer import Tokenizer

RESULTS = Path(__file__).with_name("results")
DATA_PARALLEL, ONE, PLAIN, AUTO = "data parallel", "one engine", "1P1D", "balanced auto"
BALANCED = {"balanced 0.1": 0.1, "balanced 0.2": 0.2}
SHARES = (0.45, 0.65, 0.8, 0.95, 1.1)
"""Both cores of a machine at work are slower than one: plain 1P1D may be full before its share is 1."""
QUICK_SHARE = 0.85
QUICK_RUN_S = 90.0
"""Of each of the five runs; with starting and calibrating under ten minutes."""
KNEE = 3.0
OUTPUT_TOKENS = 60
PREFIX_TOKENS, PREFIXES, OWN_TOKENS = 400, 4, 200
CALIBRATION = 4


def cluster(name: str, cores: Mapping[str, Sequence[int]], options: argparse.Namespace) -> ClusterConfig:
    """Engines by role (a letter and a number behind it), each pinned to its cores."""
    roles = {"p": "prefill", "d": "decode", "h": "hybrid"}
    nodes = [
        {
            "id": f"{roles[key[0]]}-{key[1]}",
            "role": roles[key[0]],
            "resources": {"cpus": ",".join(map(str, of))},
        }
        for key, of in cores.items()
    ]
    data: dict[str, Any] = {
        "cluster": {"name": name},
        "model": {"name": options.model},
        "engine": {
            "prefix_cache": "off" if options.workload == "synthetic" else "radix",
            "activations": options.activations,
            "max_itl_ratio": options.max_itl_ratio,
        },
        "nodes": nodes,
    }
    if len(nodes) > 1:
        data["router"] = {"address": "127.0.0.1:0"}
    return parse_cluster_config(data, name)


def candidates(options: argparse.Namespace) -> list[Candidate]:
    """All that share a cluster differ in the router's program alone."""
    a, b = options.cores
    pair = cluster("hybrids", {"h0": [a], "h1": [b]}, options)
    apart = cluster("apart", {"p0": [a], "d0": [b]}, options)
    balanced: dict[str, float | str] = {**BALANCED, AUTO: "auto"}
    found = [
        Candidate(DATA_PARALLEL, pair, program_of("round_robin", {})),
        Candidate(PLAIN, apart, program_of("prefill_decode", {})),
        *(
            Candidate(label, apart, program_of("balanced_prefill_decode", {"pd_balance_factor": factor}))
            for label, factor in balanced.items()
        ),
    ]
    if not options.quick:
        found.append(Candidate(ONE, cluster("one", {"h0": [a, b]}, options)))
    return found


def workload_of(options: argparse.Namespace) -> Callable[[Style], Workload]:
    output = Lengths.parse(str(OUTPUT_TOKENS))
    if options.workload == "synthetic":
        return lambda style: Synthetic(style, Lengths.parse(str(options.prompt_tokens)), output)
    own = Lengths.parse(str(OWN_TOKENS))
    return lambda style: SharedPrefix(style, own, output, prefix_tokens=PREFIX_TOKENS, prefixes=PREFIXES)


async def prompts_per_s(target: Target, style: Style, options: argparse.Namespace) -> float:
    """How many prompts one core takes a second: of plain 1P1D, whose decode engine has next to nothing to do with them."""
    await target.connect()
    await target.prepare()
    build, times = workload_of(options), []
    for number in range(CALIBRATION):
        ask = next(build(style).session(1_000_000 + number))
        record = await target.ask(ask.path, {**ask.body, "max_tokens": 1, "model": target.model})
        assert record.ttft_from_sent is not None
        times.append(record.ttft_from_sent)
    return 1.0 / float(statistics.median(times[1:]))


def plan_of(options: argparse.Namespace, style: Style, capacity: float) -> Plan:
    rates = options.rates or [
        round(capacity * share, 3) for share in ((QUICK_SHARE,) if options.quick else SHARES)
    ]
    requests, warmup, limit = options.requests, 10, None
    if options.quick:
        all_of_them = max(10, int(min(rates) * (QUICK_RUN_S - 20)))  # 20 s for the last ones to end
        warmup, limit = all_of_them // 6, QUICK_RUN_S
        requests = all_of_them - warmup
    settings = ExperimentSettings(LoadSettings(requests, warmup), max_run_s=limit)
    loads = [Poisson(rate, options.seed) for rate in rates]
    counter = Tokenizer.load(open_model(options.model))
    return Plan(style, workload_of(options), loads, settings, lambda text: len(counter.encode(text)))


async def measure(options: argparse.Namespace, console: Console) -> Report:
    counter = Tokenizer.load(open_model(options.model))
    prose = Prose(lambda text: len(counter.encode(text)))
    style = Style(prose, Sampling(), seed=options.seed)
    async with serving(candidates(options), console, timeout_s=600.0) as targets:
        plain = next(target for target in targets if target.label == PLAIN)
        capacity = await prompts_per_s(plain, style, options)
        console.line(f"one core takes {capacity:.3f} prompts a second")
        report = await run_suite(targets, plan_of(options, style, capacity), console)
        show(
            {**report, "prompts_per_s_of_a_core": capacity}, options
        )  # before what may still fail or be interrupted
    return report


def show(report: Report, options: argparse.Namespace) -> None:
    """Print and write what was measured."""
    found = figures(report)
    print(table(report))
    for name, value in found.items():
        print(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}")
    write(options, report, found)


def mean_jct(report: Report, label: str, rate: float) -> float | None:
    return figure(report, label, rate, "jct", "mean")


def figure(report: Report, label: str, rate: float, name: str, which: str) -> float | None:
    """None when there is no such run."""
    runs = [run for run in report["runs"] if run["label"] == label and run["rate"] == rate]
    value: float | None = latency(runs[0], name, which) if runs else None
    return value


def knee(report: Report) -> float | None:
    """The rate just below it; None when plain 1P1D was not measured."""
    rates = sorted({run["rate"] for run in report["runs"] if run["label"] == PLAIN})
    light = mean_jct(report, PLAIN, rates[0]) if rates else None
    if light is None:
        return None
    kept = takewhile(lambda rate: (mean_jct(report, PLAIN, rate) or math.inf) <= KNEE * light, rates)
    below: float = max(kept)
    return below


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def best(report: Report, labels: Sequence[str], rate: float) -> float | None:
    """The lowest mean JCT of these."""
    known = [jct for label in labels if (jct := mean_jct(report, label, rate)) is not None]
    return min(known) if len(known) == len(labels) else None


def figures(report: Report) -> dict[str, Any]:
    """Of the rate just below the knee; auto against the best fixed factor at every rate, too."""
    rate = knee(report)
    if rate is None:
        return {}
    rates = sorted({run["rate"] for run in report["runs"]})
    fixed = (PLAIN, *BALANCED)
    tpots = (figure(report, label, rate, "tpot", "p99") for label in (PLAIN, DATA_PARALLEL))
    auto = {one: ratio(mean_jct(report, AUTO, one), best(report, fixed, one)) for one in rates}
    return {
        "rate_below_knee": rate,
        "p99_tpot_ratio_pd_vs_dp": ratio(*tpots),
        "mean_jct_ratio_balanced_vs_pd": ratio(
            best(report, tuple(BALANCED), rate), mean_jct(report, PLAIN, rate)
        ),
        "mean_jct_ratio_auto_vs_best": auto[rate],
        "mean_jct_ratio_auto_vs_best_by_rate": auto,
    }


def write(options: argparse.Namespace, report: Report, found: Mapping[str, Any]) -> None:
    """The whole report and its pictures, unless it was a quick one or ended before the first; the figures where they are
    wanted."""
    if not options.quick and report["runs"]:
        options.results.mkdir(parents=True, exist_ok=True)
        stem = options.results / f"patterns_{options.workload.replace('-', '_')}"
        write_report(stem.with_suffix(".json"), {**report, "figures": found})
        write_text(stem.with_suffix(".svg"), panel(report))
        write_text(stem.with_suffix(".html"), page(report, "Which pattern wins"))
        print(f"written: {stem}.json, .svg and .html")
    if options.json is not None:
        runs = [
            {key: run[key] for key in ("label", "rate", "summary", "transfers")} for run in report["runs"]
        ]
        options.json.write_text(json.dumps({**found, "runs": runs}, indent=1) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=("synthetic", "shared-prefix"), default="synthetic")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="catalog name, GGUF file or directory")
    parser.add_argument(
        "--prompt-tokens", type=int, default=600, help="of the synthetic workload (default: 600)"
    )
    parser.add_argument("--activations", default="int8", help="of all engines: int8 (default) or float32")
    parser.add_argument(
        "--max-itl-ratio",
        type=float,
        default=EngineConfig().max_itl_ratio,
        metavar="X",
        help="of all engines (default: %(default)s)",
    )
    parser.add_argument(
        "--rates", type=_rates, help="requests a second, instead of shares of what is measured"
    )
    parser.add_argument(
        "--requests", type=int, default=60, help="counted in each run, after 10 (default: 60)"
    )
    parser.add_argument("--cores", type=_cores, help="two, as in 0,1 (default: the first two there are)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one rate, fewer requests: under ten minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="of a run that is not quick"
    )
    options = parser.parse_args(arguments)
    options.cores = options.cores or sorted(os.sched_getaffinity(0))[:2]
    if len(options.cores) != 2:
        parser.error("two cores are needed")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.absolute().parent}")
    return options


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _cores(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        report = asyncio.run(measure(options, Console(plain_step=1.0)))
    except MicroservingError as error:
        sys.exit(error.message)
    return 130 if report["stopped"] else 0


if __name__ == "__main__":
    sys.exit(main())
