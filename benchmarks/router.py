"""What a router costs: ours with the shipped `prefill_decode` program, against the Rust routers in prefill/decode mode.

    python benchmarks/router.py [--quick] [--json FILE] [--only microserving]

All routers run at the same time in front of the same two mock engines, and are measured in turns. Ours has on what it
has on by default: health probes, metrics, cancellation, retries. Then 1,000 paced streams at once through ours alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from router_parts.processes import Pace, Programs, Router, install_peers, running

OURS = "microserving"
PEERS = ("vllm-router", "sglang-router")
MLC_RPS = 300.0
"""MLC-LLM's router with its disaggregation program, requests per second at 32 connections (2 cores, 2.8 GHz Xeon)."""
PROMPT = "hello world this is a test"
WHOLE = {"model": "mock", "prompt": PROMPT, "max_tokens": 16, "stream": False}
STREAMS = 64
PACE = Pace(interval_us=20_000, groups=1)
MANY_STREAMS = 1000
MANY_PACE = Pace(interval_us=100_000, groups=50)


@dataclass(frozen=True)
class Sizes:
    """rounds: each measures every router once."""

    rounds: int
    sequential: int
    parallel: int
    events: int
    many_events: int


FULL = Sizes(rounds=5, sequential=2000, parallel=20_000, events=200, many_events=600)
QUICK = Sizes(rounds=2, sequential=500, parallel=6_000, events=60, many_events=60)


@dataclass(frozen=True)
class Turn:
    """One router, measured once. p50_us: of whole answers on one connection. Costs: CPU microseconds."""

    rps32: float
    p50_us: float
    cpu_per_request: float
    cpu_per_event: float
    event_p50_us: float
    event_p99_us: float


def measure(programs: Programs, router: Router, sizes: Sizes) -> Turn:
    one = _good(programs.load(router.port, connections=1, requests=sizes.sequential, body=WHOLE))
    before = router.cpu_s()
    many = _good(programs.load(router.port, connections=32, requests=sizes.parallel, body=WHOLE))
    between = router.cpu_s()
    streamed = {**WHOLE, "stream": True, "max_tokens": sizes.events}
    paced = _good(programs.load(router.port, connections=STREAMS, requests=STREAMS, body=streamed))
    after = router.cpu_s()
    return Turn(
        rps32=many["rps"],
        p50_us=one["total_us_p50"],
        cpu_per_request=(between - before) / many["requests"] * 1e6,
        cpu_per_event=(after - between) / paced["events"] * 1e6,
        event_p50_us=paced["event_us_p50"],
        event_p99_us=paced["event_us_p99"],
    )


def compare(programs: Programs, names: Sequence[str], sizes: Sizes) -> dict[str, list[Turn]]:
    """Router -> its turn in every round."""
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    with ExitStack() as stack:
        engines = stack.enter_context(programs.engines(PACE))
        routers = [stack.enter_context(running(name, engines)) for name in names]
        for router in routers:
            programs.load(router.port, connections=8, requests=400, body=WHOLE)  # warm
        for _ in range(sizes.rounds):
            for router in routers:
                turns[router.name].append(measure(programs, router, sizes))
    return turns


def medians_of(turns: Mapping[str, Sequence[Turn]]) -> dict[str, dict[str, float]]:
    """Router -> figure -> median over the rounds."""
    figures = Turn.__dataclass_fields__
    return {
        name: {figure: statistics.median(getattr(turn, figure) for turn in of) for figure in figures}
        for name, of in turns.items()
    }


def many_streams(programs: Programs, sizes: Sizes) -> dict[str, float]:
    """1,000 streams at once through ours. The delay is the age of an event when the client has it."""
    body = {**WHOLE, "stream": True, "max_tokens": sizes.many_events}
    direct = {**body, "max_tokens": 20}
    with programs.engines(MANY_PACE) as engines, running(OURS, engines) as router:
        programs.load(router.port, connections=32, requests=2000, body=WHOLE)
        rest = router.memory()
        alone = _good(programs.load(engines[1], connections=MANY_STREAMS, requests=MANY_STREAMS, body=direct))
        before = router.cpu_s()
        with _Sampler(router) as sampler:
            streams = programs.load(router.port, connections=MANY_STREAMS, requests=MANY_STREAMS, body=body)
        cpu_s = router.cpu_s() - before
    return {
        "streams": MANY_STREAMS,
        "seconds": streams["seconds"],
        "errors": streams["bad"],
        "events_per_s": streams["events"] / streams["seconds"],
        "added_delay_p50_us": streams["event_us_p50"] - alone["event_us_p50"],
        "added_delay_p99_us": streams["event_us_p99"] - alone["event_us_p99"],
        "memory_per_stream": (sampler.most - rest) / MANY_STREAMS,
        "cpu_per_event": cpu_s / streams["events"] * 1e6,
    }


class _Sampler:
    """Notes the most memory that a router has while the context lasts."""

    def __init__(self, router: Router) -> None:
        self.most = 0
        self._router = router
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.5):
            self.most = max(self.most, self._router.memory())


def ratios(turns: Mapping[str, Sequence[Turn]]) -> dict[str, float]:
    """Ours / the faster peer: the median of the rounds' own ratios, so that a busy minute counts once."""
    rounds = [
        (ours, peers) for ours, *peers in zip(turns[OURS], *(turns[name] for name in PEERS), strict=True)
    ]
    return {
        "rps32": statistics.median(ours.rps32 / max(peer.rps32 for peer in peers) for ours, peers in rounds),
        "p50": statistics.median(ours.p50_us / min(peer.p50_us for peer in peers) for ours, peers in rounds),
        "cpu_per_event": statistics.median(
            ours.cpu_per_event / min(peer.cpu_per_event for peer in peers) for ours, peers in rounds
        ),
    }


def report(turns: Mapping[str, Sequence[Turn]], streams: Mapping[str, float] | None) -> dict[str, Any]:
    medians = medians_of(turns)
    peers = {name: dict(of) for name, of in medians.items() if name != OURS}
    result: dict[str, Any] = {"rps32": medians[OURS]["rps32"], "ours": dict(medians[OURS]), "peers": peers}
    if peers:
        result["ratio"] = ratios(turns)
    result["rps32_over_mlc"] = medians[OURS]["rps32"] / MLC_RPS
    if streams is not None:
        result["streams"] = dict(streams)
    return result


def _good(figures: dict[str, Any]) -> dict[str, Any]:
    if figures["bad"]:
        sys.exit(f"{figures['bad']} answers were bad")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, and 1,000 streams for 6 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--only", choices=[OURS, *PEERS], help="measure one router, without ratios")
    parser.add_argument("--no-streams", action="store_true", help="leave the 1,000 streams out")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    if (load := os.getloadavg()[0]) > 1:
        print(f"the machine is busy (load {load:.1f}): only the ratios mean something", file=sys.stderr)
    if options.only != OURS:
        install_peers()
    with TemporaryDirectory() as folder:
        programs = Programs(Path(folder))
        turns = compare(programs, [options.only] if options.only else [OURS, *PEERS], sizes)
        streams = None if options.no_streams else many_streams(programs, sizes)
    medians = medians_of(turns)
    for name, figures in medians.items():
        print(name.ljust(14), "  ".join(f"{key} {value:.1f}" for key, value in figures.items()))
    result = report(turns, streams) if OURS in medians else dict(medians)
    print(json.dumps({key: value for key, value in result.items() if key not in ("ours", "peers")}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
