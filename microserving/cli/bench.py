"""`microserving bench`: measures servers and patterns, compares them, and shows what came out."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microserving.cli.bench_flags import (
    add_load_flags,
    add_output_flags,
    add_target_flags,
    add_workload_flags,
)
from microserving.cli.settings import parse_setting

if TYPE_CHECKING:
    from microserving.bench.arrivals import Arrivals
    from microserving.bench.experiment import ExperimentSettings
    from microserving.bench.suite import BuildWorkload, Candidate, Plan
    from microserving.bench.targets import Program, Target
    from microserving.bench.workloads import TraceEntry

_ENDED_EARLY = 130
_REQUESTS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Send requests, write down when each token came, and compare.

  microserving bench --base-url http://127.0.0.1:8000/v1 --rate 0.5,1,2     any OpenAI server
  microserving bench --config a.toml --config b.toml --rate 0.5,1           clusters that it starts, in turns
  microserving bench --config configs/1p1d.toml --rate 0.5 \\
      --program prefill_decode --program balanced_prefill_decode:pd_balance_factor=0.1
  microserving bench ... --json a.json --html a.html                        keep everything; a page with charts
  microserving bench compare a.json b.json                                  what changed, and whether by chance
  microserving bench compare a.json                                         its patterns against the first one
  microserving bench page a.json a.html                                     the page of a file

TTFT is the time to the first token, TPOT the mean time of a token after it, ITL each gap, JCT the time of the whole
request. With --rate they count from the time at which a request was due, whether the server kept up or not."""
    add_target_flags(parser.add_argument_group("what is measured"))
    add_workload_flags(parser.add_argument_group("what is asked"))
    add_load_flags(parser.add_argument_group("how much"))
    add_output_flags(parser.add_argument_group("what comes out"))
    actions = parser.add_subparsers(title="actions", metavar="ACTION", parser_class=argparse.ArgumentParser)
    compare = actions.add_parser(
        "compare", help="two JSON files side by side, or the patterns of one", allow_abbrev=False
    )
    compare.description = """\
By how much each latency differs, and whether that could be chance. Of two files: the runs of the same pattern and load (of
the same load, where each file has one pattern). Of one file: every other pattern against the baseline, load by load."""
    compare.add_argument("a", type=Path, metavar="A.json")
    compare.add_argument("b", type=Path, metavar="B.json", nargs="?")
    compare.add_argument(
        "--baseline",
        metavar="PATTERN",
        help="of one file: what the others are compared with (default: the first)",
    )
    compare.set_defaults(action=run_compare)
    page = actions.add_parser("page", help="make the HTML page of a JSON file", allow_abbrev=False)
    page.add_argument("report", type=Path, metavar="A.json")
    page.add_argument("page", type=Path, metavar="A.html")
    page.set_defaults(action=run_page)


def run(options: argparse.Namespace) -> int:
    action: Callable[[argparse.Namespace], int] = getattr(options, "action", run_bench)
    return action(options)


def run_bench(options: argparse.Namespace) -> int:
    """130 when it was ended early, 1 when a request failed, or all, or nothing was measured."""
    _check(options)
    from microserving.observability.console import Console

    console = Console(verbose=options.verbose, plain_step=0.25)
    report = asyncio.run(_measure(options, _plan(options), console))
    if report["stopped"] and report["error"] is None:
        return _ENDED_EARLY
    failed = report["error"] is not None or any(run["summary"]["failed"] for run in report["runs"])
    return int(failed or not report["runs"])


def run_compare(options: argparse.Namespace) -> int:
    from microserving.bench.compare import compare, compare_patterns
    from microserving.bench.report import read_report

    if options.b is not None and options.baseline is not None:
        options.parser.error("--baseline is for one report")
    a = read_report(options.a)
    _write(compare_patterns(a, options.baseline) if options.b is None else compare(a, read_report(options.b)))
    return 0


def run_page(options: argparse.Namespace) -> int:
    from microserving.bench.page import page
    from microserving.bench.report import read_report, write_text

    write_text(options.page, page(read_report(options.report)))
    return 0


def _check(options: argparse.Namespace) -> None:
    """What argparse does not see; ends the process with status 2."""
    error: Callable[[str], None] = options.parser.error
    if not options.base_url and not options.config:
        error("nothing to measure: give --base-url or --config")
    if options.program and not options.config:
        error("--program is for clusters of --config")
    if bool(options.trace) != (options.workload == "trace"):
        error("--workload trace and --trace FILE go together")
    if bool(options.phase) != (options.workload == "mix"):
        error("--workload mix and --phase go together")
    if options.rate and options.concurrency:
        error("--rate and --concurrency exclude each other")
    if not (options.rate or options.concurrency or options.trace):
        error("how much? give --rate or --concurrency")
    if options.constant and not options.rate:
        error("--constant is for --rate")
    if options.trace_ms and not options.trace:
        error("--trace-ms is for --trace")
    if options.speed and (not options.trace or options.rate or options.concurrency):
        error("--speed is for the times of --trace, without --rate or --concurrency")
    if options.extra_body.get("stream", True) is not True or options.extra_body.get("n", 1) != 1:
        error("--extra-body: a request is one streamed answer")
    if options.svg and not options.rate:
        error("--svg draws latencies against the rate: give --rate")
    for path in filter(None, (options.json, options.html, options.svg)):
        if path.is_dir() or not path.parent.is_dir():  # told now, not after hours
            error(f"cannot write {path}")


def _plan(options: argparse.Namespace) -> Plan:
    from microserving.bench.suite import Plan
    from microserving.bench.texts import Prose
    from microserving.bench.trace import read_trace
    from microserving.bench.workloads import Sampling, Style

    entries = [] if options.trace is None else read_trace(options.trace, milliseconds=options.trace_ms)
    sampling = Sampling(
        options.model, options.temperature, options.top_p, options.ignore_eos, options.extra_body
    )
    style = Style(Prose(), sampling, options.endpoint, options.seed)
    return Plan(
        style,
        _workload_builder(options, entries),
        _loads(options, entries),
        _settings(options, len(entries)),
        _token_counter(options.tokenizer),
    )


def _workload_builder(options: argparse.Namespace, entries: list[TraceEntry]) -> BuildWorkload:
    from microserving.bench.workloads import Chat, Mix, SharedPrefix, Synthetic, Trace

    lengths = options.input, options.output
    chat = {"turns": options.turns, "think_s": options.think, "system_tokens": options.system_tokens}
    prefix = {"prefix_tokens": options.prefix_tokens, "prefixes": options.prefixes}
    builders: dict[str, BuildWorkload] = {
        "synthetic": lambda style: Synthetic(style, *lengths),
        "shared-prefix": lambda style: SharedPrefix(style, *lengths, **prefix),
        "chat": lambda style: Chat(style, *lengths, **chat),
        "mix": lambda style: Mix(style, options.phase),
        "trace": lambda style: Trace(style, entries, options.trace.name),
    }
    return builders[options.workload]


def _loads(options: argparse.Namespace, entries: list[TraceEntry]) -> list[Arrivals]:
    from microserving.bench.arrivals import Closed, Constant, Poisson, Replay
    from microserving.bench.trace import offsets

    if options.concurrency:
        return [Closed(clients) for clients in options.concurrency]
    if options.rate:
        return [Constant(r) if options.constant else Poisson(r, options.seed) for r in options.rate]
    return [Replay(offsets(entries), options.speed or 1.0)]


def _settings(options: argparse.Namespace, trace_length: int) -> ExperimentSettings:
    from microserving.bench.experiment import ExperimentSettings
    from microserving.bench.load import LoadSettings

    requests, warmup = _counted(options, trace_length)
    load = LoadSettings(requests, warmup, options.keep_load, options.max_concurrency)
    return ExperimentSettings(load, options.slo, options.max_run)


def _counted(options: argparse.Namespace, trace_length: int) -> tuple[int, int]:
    """Requests that count, and those before them."""
    from microserving.errors import ConfigError

    if not trace_length:
        requests = options.requests or _REQUESTS
        return requests, requests // 6 if options.warmup is None else options.warmup
    warmup = options.warmup or 0
    left = trace_length - warmup
    if left < (options.requests or 1):
        wanted = "nothing" if options.requests is None else f"fewer than {options.requests}"
        raise ConfigError(
            f"--warmup {warmup} leaves {wanted} to count of the trace's {trace_length} requests"
        )
    return options.requests or left, warmup


def _token_counter(model: str | None) -> Callable[[str], int] | None:
    if model is None:
        return None
    from microserving.model_files import open_model
    from microserving.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(open_model(model))
    return lambda text: len(tokenizer.encode(text))


async def _measure(options: argparse.Namespace, plan: Plan, console: Any) -> dict[str, Any]:
    from microserving.bench.suite import check_labels, run_suite, serving

    candidates = _candidates(options)
    own = _addresses(options)
    try:
        check_labels([target.label for target in own] + [candidate.label for candidate in candidates])
        async with serving(
            candidates,
            console,
            timeout_s=options.timeout,
            cache_dir=options.cache_dir,
            api_key=_api_key(options),
        ) as started:
            report = await run_suite([*own, *started], plan, console)
            _show(options, report)  # before the clusters end, which takes time and may fail
            return report
    finally:
        for target in own:
            await target.close()


def _addresses(options: argparse.Namespace) -> list[Target]:
    from microserving.bench.targets import Target

    key, targets = _api_key(options), []
    for text in options.base_url:
        label, separator, url = text.partition("=")
        if not separator or "/" in label:  # an address may have a = of its own
            label, url = text, text
        targets.append(Target(label, url, model=options.model, api_key=key, timeout_s=options.timeout))
    return targets


def _api_key(options: argparse.Namespace) -> str | None:
    names = ("MICROSERVING_API_KEY", "OPENAI_API_KEY")
    key: str | None = options.api_key
    return key or next((os.environ[name] for name in names if os.environ.get(name)), None)


def _candidates(options: argparse.Namespace) -> list[Candidate]:
    from microserving.bench.suite import Candidate
    from microserving.cluster.config import load_cluster_config

    programs = [_program(text) for text in options.program]
    candidates = []
    for path in options.config:
        config = load_cluster_config(path)
        name = config.cluster.name
        if not programs:
            candidates.append(Candidate(name, config))
        several = len(options.config) > 1
        for text, program in zip(options.program, programs, strict=True):
            candidates.append(Candidate(f"{name} {text}" if several else text, config, program))
    return candidates


def _program(text: str) -> Program:
    from microserving.bench.clusters import program_of
    from microserving.errors import ConfigError

    name, _, settings = text.partition(":")
    try:
        return program_of(name, dict(parse_setting(part) for part in filter(None, settings.split(","))))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--program {text}: {error}") from error


def _show(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """The table, and the files that were asked for."""
    from microserving.bench.charts import panel
    from microserving.bench.page import page
    from microserving.bench.report import write_report, write_text
    from microserving.bench.table import table

    _write(table(report))
    if options.json is not None:
        write_report(options.json, report)
    if options.html is not None:
        write_text(options.html, page(report))
    if options.svg is not None and (picture := panel(report)):
        write_text(options.svg, picture)


def _write(text: str) -> None:
    sys.stdout.write(text)
