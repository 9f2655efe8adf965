"""How much a long prompt disturbs those who read their output: gaps between tokens while it is computed.

    python benchmarks/interference.py [--quick] [--only hybrid|1p1d] [--prompt-tokens N] [--json FILE]

Four streams decode; after a while a prompt of 3,000 tokens comes. ``hybrid``: all at one engine with two threads.
``1p1d``: through a router at two engines with one core each, where the streams are on the decode engine and the prompt
goes to the prefill engine. Gaps are taken at the client, between the events of one stream. Undisturbed: those before the
prompt was sent and, after it was answered, a window of the same kind, so that the streams' growing contexts count
half each; disturbed: between the prompt's sending and its first token. The ratio of the 99th percentiles is taken in each
round; the median of the rounds counts. What the pace costs the prompt is told by the same prompt alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from serving import Serving, Stream, Words, complete, percentile, up

from microserving.model_files import DEFAULT_MODEL, open_model
from microserving.tokenizer import Tokenizer

GOALS = {"hybrid": 3.0, "1p1d": 1.5}
DECODES = 4
DECODE_PROMPT_TOKENS = 32
SETTLE_EVENTS = 8
"""Events of each stream before anything is counted: all four run by then."""
SHARE = 0.99
CONFIGS = {
    "hybrid": """\
[[nodes]]
id = "engine-0"
[nodes.resources]
compute_units = 2
""",
    "1p1d": """\
[router]
program = "prefill_decode"
[[nodes]]
id = "prefill-0"
role = "prefill"
[nodes.resources]
compute_units = 1
[[nodes]]
id = "decode-0"
role = "decode"
[nodes.resources]
compute_units = 1
""",
}


@dataclass(frozen=True)
class Round:
    """Milliseconds and seconds. gaps: how many are behind the undisturbed and the disturbed figures.

    alone_s, beside_s: TTFT of the long prompt. tokens_per_s: of the four streams together.
    """

    where: str
    undisturbed_p50_ms: float
    undisturbed_p99_ms: float
    disturbed_p50_ms: float
    disturbed_p99_ms: float
    disturbed_max_ms: float
    gaps: tuple[int, int]
    alone_s: float
    beside_s: float
    undisturbed_tokens_per_s: float
    disturbed_tokens_per_s: float

    @property
    def ratio(self) -> float:
        return self.disturbed_p99_ms / self.undisturbed_p99_ms


class Streams:
    """The four decodes, as tasks; they run until ``stop``."""

    def __init__(self, url: str, words: Words) -> None:
        self.streams = [Stream() for _ in range(DECODES)]
        self._tasks = [
            asyncio.create_task(
                complete(
                    url,
                    stream,
                    prompt=words.text(DECODE_PROMPT_TOKENS),
                    max_tokens=8000 - DECODE_PROMPT_TOKENS,
                )
            )
            for stream in self.streams
        ]

    async def events(self, count: int) -> None:
        """Until each stream has had ``count`` more events."""
        wanted = [len(stream.events) + count for stream in self.streams]
        while any(len(s.events) < n for s, n in zip(self.streams, wanted, strict=True)):
            for task in self._tasks:
                if task.done():
                    task.result()
                    sys.exit("a stream ended before the measurement did")
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gaps(self, begin: float, end: float) -> list[float]:
        return [gap for stream in self.streams for gap in stream.gaps(begin, end)]

    def tokens(self, begin: float, end: float) -> int:
        return sum(begin <= at <= end for stream in self.streams for at in stream.events)


async def measure(where: str, serving: Serving, words: Words, options: argparse.Namespace) -> Round:
    """One round: the prompt alone, then beside the streams."""
    alone = await complete(serving.url, Stream(), prompt=words.text(options.prompt_tokens), max_tokens=1)
    streams = Streams(serving.url, words)
    try:
        await streams.events(SETTLE_EVENTS)
        begin = time.perf_counter()
        await streams.events(options.gaps)
        long = await complete(serving.url, Stream(), prompt=words.text(options.prompt_tokens), max_tokens=1)
        await streams.events(SETTLE_EVENTS)
        after = time.perf_counter()
        await streams.events(options.gaps)
        end = time.perf_counter()
    finally:
        await streams.stop()
    first = long.events[0]
    undisturbed = streams.gaps(begin, long.sent) + streams.gaps(after, end)
    disturbed = streams.gaps(long.sent, first)
    quiet_s = long.sent - begin + end - after
    quiet_tokens = streams.tokens(begin, long.sent) + streams.tokens(after, end)
    return Round(
        where=where,
        undisturbed_p50_ms=percentile(undisturbed, 0.5) * 1e3,
        undisturbed_p99_ms=percentile(undisturbed, SHARE) * 1e3,
        disturbed_p50_ms=percentile(disturbed, 0.5) * 1e3,
        disturbed_p99_ms=percentile(disturbed, SHARE) * 1e3,
        disturbed_max_ms=max(disturbed) * 1e3,
        gaps=(len(undisturbed), len(disturbed)),
        alone_s=alone.ttft,
        beside_s=long.ttft,
        undisturbed_tokens_per_s=quiet_tokens / quiet_s,
        disturbed_tokens_per_s=streams.tokens(long.sent, first) / long.ttft,
    )


def show(found: Round) -> None:
    print(
        f"{found.where:7s} undisturbed p50 {found.undisturbed_p50_ms:6.1f} p99 {found.undisturbed_p99_ms:6.1f} ms, "
        f"beside the prompt p50 {found.disturbed_p50_ms:6.1f} p99 {found.disturbed_p99_ms:6.1f} "
        f"max {found.disturbed_max_ms:6.1f} ms, ratio {found.ratio:5.2f}; gaps {found.gaps}; "
        f"prompt alone {found.alone_s:.2f} s, beside {found.beside_s:.2f} s; "
        f"{found.undisturbed_tokens_per_s:.0f} -> {found.disturbed_tokens_per_s:.0f} tok/s",
        flush=True,
    )


def report(rounds: Sequence[Round]) -> dict[str, object]:
    """Medians over the rounds of each place."""
    figures: dict[str, object] = {}
    for where in dict.fromkeys(found.where for found in rounds):
        of = [found for found in rounds if found.where == where]
        figures[f"itl_p99_ratio_{where}"] = statistics.median(found.ratio for found in of)
        figures[f"prompt_slowdown_{where}"] = statistics.median(r.beside_s / r.alone_s for r in of)
        figures[f"decode_rate_kept_{where}"] = statistics.median(
            r.disturbed_tokens_per_s / r.undisturbed_tokens_per_s for r in of
        )
    return {**figures, "goals": GOALS, "rounds": [{**asdict(r), "ratio": r.ratio} for r in rounds]}


def run(options: argparse.Namespace) -> list[Round]:
    words = Words(Tokenizer.load(open_model(options.model)), options.seed)
    model = f"[model]\nname = {json.dumps(options.model)}\n"
    rounds = []
    with ExitStack() as stack:
        places = [options.only] if options.only else list(CONFIGS)
        servings = {where: stack.enter_context(up(model + CONFIGS[where])) for where in places}
        for serving in servings.values():
            asyncio.run(complete(serving.url, Stream(), prompt=words.text(64), max_tokens=4))  # warm
        for _ in range(options.rounds):
            for where, serving in servings.items():
                rounds.append(asyncio.run(measure(where, serving, words, options)))
                show(rounds[-1])
    return rounds


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="catalog name, GGUF file or directory")
    parser.add_argument("--only", choices=list(CONFIGS))
    parser.add_argument("--prompt-tokens", type=int, default=3000, help="of the long prompt")
    parser.add_argument("--rounds", type=int, help="of each place (default: 7, quick 2)")
    parser.add_argument("--gaps", type=int, help="of each stream before and after (default: 200, quick 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' words")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and gaps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 7)
    options.gaps = options.gaps or (60 if options.quick else 200)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    figures = report(run(options))
    for where, goal in GOALS.items():
        if f"itl_p99_ratio_{where}" in figures:
            print(f"itl_p99_ratio_{where} {figures[f'itl_p99_ratio_{where}']:.2f} (goal: below {goal})")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
