"""What a cached prefix saves: the second of two prompts that share 1,500 of 1,600 tokens, against the first.

    python benchmarks/prefix_cache.py [--quick] [--shared N] [--suffix N] [--json FILE]

A real cluster of one prefill and one decode engine (one core each), once through a router of each program, and one
engine alone with all cores. All run at the same time and are asked in turns, every time with a prefix of its own. That the
second request computes and transfers only the suffix is checked by the engines' counters; the exit status is 1 if not.
TTFT at the client, whose text is tokenised on the way; medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from serving import Serving, Stream, Words, complete, router, up

from microserving.model_files import DEFAULT_MODEL, open_model
from microserving.tokenizer import Tokenizer

GOAL = 0.15
OUTPUT_TOKENS = 4
PAGE_TOKENS = 16
HEADLINE = "prefill_decode"
PROGRAMS = ("balanced_prefill_decode", "prefix_aware", "adaptive")
ALONE = "one engine"
CLUSTER = """\
[model]
name = {model}
[router]
program = "prefill_decode"
[[nodes]]
id = "prefill-0"
role = "prefill"
[[nodes]]
id = "decode-0"
role = "decode"
"""
ENGINE = """\
[model]
name = {model}
[[nodes]]
id = "engine-0"
"""


@dataclass(frozen=True)
class Target:
    """Who is asked, at which address, and the engines behind."""

    name: str
    url: str
    serving: Serving

    def counters(self) -> dict[str, dict[str, int]]:
        return {node: self.serving.counters(node) for node in self.serving.nodes}


@dataclass(frozen=True)
class Asked:
    """One request. computed: prompt tokens, by engine; sent, received: tokens whose K/V went over."""

    ttft_s: float
    cached_tokens: int
    computed: dict[str, int]
    sent: int
    received: int

    def fault(self, suffix: int, prompt: int, slack: int) -> str | None:
        """What it did beyond the suffix, in words. slack: so many tokens more are no fault."""
        if self.cached_tokens < prompt - suffix - slack:
            return f"only {self.cached_tokens} tokens were found in the cache"
        if not suffix <= sum(self.computed.values()) <= suffix + slack:
            return f"{self.computed} tokens were computed"
        if self.sent != self.received or self.sent > suffix + slack:
            return f"{self.sent} tokens were sent, {self.received} received"
        return None


@dataclass(frozen=True)
class Pair:
    target: str
    cold: Asked
    warm: Asked


def ask(target: Target, prompt: str) -> Asked:
    before = target.counters()
    stream = asyncio.run(complete(target.url, Stream(), prompt=prompt, max_tokens=OUTPUT_TOKENS))
    after = target.counters()

    def moved(node: str, name: str) -> int:
        return after[node][name] - before[node][name]

    return Asked(
        ttft_s=stream.ttft,
        cached_tokens=stream.usage["prompt_tokens_details"]["cached_tokens"],
        computed={node: moved(node, "prompt_tokens_computed") for node in after},
        sent=sum(moved(node, "tokens_sent") for node in after),
        received=sum(moved(node, "tokens_received") for node in after),
    )


def measure(targets: Sequence[Target], words: Words, options: argparse.Namespace) -> list[Pair]:
    pairs = []
    for _ in range(options.rounds):
        for target in targets:
            prefix = words.text(options.shared)
            cold, warm = (ask(target, prefix + words.text(options.suffix)) for _ in range(2))
            pairs.append(Pair(target.name, cold, warm))
            ratio = warm.ttft_s / cold.ttft_s
            print(
                f"{target.name:24s} cold {cold.ttft_s:7.3f} s  warm {warm.ttft_s:7.3f} s  ratio {ratio:.3f}"
            )
    return pairs


def report(pairs: Sequence[Pair], options: argparse.Namespace) -> dict[str, object]:
    """Medians by target. Ratios are of the medians; all pairs are in it, too."""
    targets: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(pair.target for pair in pairs):
        cold = statistics.median(pair.cold.ttft_s for pair in pairs if pair.target == name)
        warm = statistics.median(pair.warm.ttft_s for pair in pairs if pair.target == name)
        targets[name] = {"cold_s": cold, "warm_s": warm, "ttft_ratio_warm_cold": warm / cold}
    return {
        "ttft_ratio_warm_cold": targets[HEADLINE]["ttft_ratio_warm_cold"],
        "goal": GOAL,
        "shared_tokens": options.shared,
        "prompt_tokens": options.shared + options.suffix,
        "targets": targets,
        "pairs": [asdict(pair) for pair in pairs],
    }


def faults(pairs: Sequence[Pair], suffix: int, prompt: int) -> list[str]:
    """``balanced_prefill_decode`` reserves for less than the prompt: what is cached beyond that is found by whole pages."""
    slack = {"balanced_prefill_decode": PAGE_TOKENS - 1}
    found = ((pair.target, pair.warm.fault(suffix, prompt, slack.get(pair.target, 0))) for pair in pairs)
    return [f"{target}: the second request: {fault}" for target, fault in found if fault is not None]


def run(options: argparse.Namespace) -> list[Pair]:
    model = json.dumps(options.model)
    words = Words(Tokenizer.load(open_model(options.model)), options.seed)
    with ExitStack() as stack:
        cluster = stack.enter_context(up(CLUSTER.format(model=model)))
        engine = stack.enter_context(up(ENGINE.format(model=model)))
        targets = [Target(HEADLINE, cluster.url, cluster)]
        for program in () if options.quick else PROGRAMS:
            url = stack.enter_context(
                router(cluster, program=program, prefill="prefill-0", decode="decode-0")
            )
            targets.append(Target(program, url, cluster))
        targets.append(Target(ALONE, engine.url, engine))
        for target in targets:
            ask(target, words.text(64))  # warm
        return measure(targets, words, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="catalog name, GGUF file or directory")
    parser.add_argument("--shared", type=int, default=1500, help="tokens that both prompts begin with")
    parser.add_argument("--suffix", type=int, default=100, help="tokens of each prompt's own")
    parser.add_argument("--rounds", type=int, help="pairs for each target (default: 7, quick 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' words")
    parser.add_argument("--quick", action="store_true", help=f"only {HEADLINE} and {ALONE}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (3 if options.quick else 7)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    pairs = run(options)
    figures = report(pairs, options)
    wrong = faults(pairs, options.suffix, options.shared + options.suffix)
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"ttft_ratio_warm_cold {figures['ttft_ratio_warm_cold']:.3f} (goal: at most {GOAL})")
    if options.json is not None:
        options.json.write_text(json.dumps({**figures, "faults": wrong}, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
