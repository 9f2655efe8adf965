"""What the prefix cache's tree costs: look-up, insertion and eviction against a tree of many cached tokens.

    python benchmarks/prefix_tree.py [--quick] [--cached-tokens N] [--prompt-tokens N] [--page-size N] [--json FILE]

Two trees of the same size: ``flat``, prompts with nothing in common (as many children of the root as prompts), and
``shared``, conversations that begin with one of a few long system prompts. ``wide``: prompts of one page each, all of them
children of one node, the worst case for sorted siblings. The median of many runs counts, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from microserving.scheduler import PageAllocator, PageState, PrefixCache

VOCABULARY = 49_152
OWNER = "benchmark"
GOAL_MS = 1.0
"""For a match of 2,000 tokens against 1,000,000 cached ones."""


@dataclass(frozen=True)
class Measurement:
    """Microseconds: of one call with a whole prompt, but ``evict_us`` of one page."""

    tree: str
    cached_tokens: int
    prompt_tokens: int
    match_us: float
    miss_us: float
    acquire_release_us: float
    publish_us: float
    evict_us: float


class Tree:
    """A cache, and the prompts that are in it."""

    def __init__(self, cached_tokens: int, page_size: int, prompts: list[list[int]]) -> None:
        spare = len(prompts[0]) // page_size + 1
        self.allocator = PageAllocator(cached_tokens // page_size + 64 * spare)
        self.cache = PrefixCache(page_size, self.allocator)
        self.prompts = prompts
        for prompt in prompts:
            self.publish(prompt)

    def publish(self, prompt: list[int]) -> None:
        """What a request does when it ends: own pages for what is not cached, then all of them into the tree."""
        handle = self.cache.acquire("", prompt, len(prompt))
        own = len(prompt) // self.cache.page_size - handle.shared
        pages = handle.pages + self.allocator.allocate(own, PageState.RUNNING, OWNER)
        self.cache.publish(handle, prompt, pages, OWNER)
        self.cache.release(handle)

    def acquire_release(self, prompt: list[int]) -> None:
        self.cache.release(self.cache.acquire("", prompt, len(prompt)))


def random_tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCABULARY) for _ in range(count)]


def prompts_of(kind: str, cached_tokens: int, length: int, page_size: int) -> list[list[int]]:
    """Distinct pages of together about ``cached_tokens``."""
    generator = random.Random(0)
    if kind == "flat":
        return [random_tokens(generator, length) for _ in range(cached_tokens // length)]
    if kind == "wide":
        return [random_tokens(generator, page_size) for _ in range(cached_tokens // page_size)]
    systems = [random_tokens(generator, length * 3 // 4) for _ in range(4)]
    rest = length - len(systems[0])
    return [
        systems[n % len(systems)] + random_tokens(generator, rest)
        for n in range((cached_tokens - 4 * len(systems[0])) // rest)
    ]


def median_us(calls: Sequence[Callable[[], object]]) -> float:
    times = []
    for call in calls:
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def measure(kind: str, cached_tokens: int, length: int, page_size: int, runs: int) -> Measurement:
    prompts = prompts_of(kind, cached_tokens, length, page_size)
    tree = Tree(cached_tokens, page_size, prompts)
    generator = random.Random(1)
    known = [generator.choice(prompts) for _ in range(runs)]
    unknown = [random_tokens(generator, len(prompts[0])) for _ in range(min(runs, 60))]
    cache, size = tree.cache, len(tree.cache) * page_size
    match = median_us([lambda p=p: cache.match("", p) for p in known])
    miss = median_us([lambda p=p: cache.match("", p) for p in unknown])
    acquire = median_us([lambda p=p: tree.acquire_release(p) for p in known])
    publish = median_us([lambda p=p: tree.publish(p) for p in unknown])
    batch = max(1, len(prompts[0]) // page_size)
    evict = median_us([lambda: cache.evict(batch) for _ in range(min(runs, 200))]) / batch
    return Measurement(kind, size, len(prompts[0]), match, miss, acquire, publish, evict)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--cached-tokens", type=int, default=1_000_000)
    parser.add_argument("--prompt-tokens", type=int, default=2_000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    found = []
    for kind in ("flat", "shared", "wide"):
        item = measure(
            kind,
            options.cached_tokens,
            options.prompt_tokens,
            options.page_size,
            50 if options.quick else 500,
        )
        found.append(item)
        print(
            f"{kind:7s} {item.cached_tokens} cached, prompts of {item.prompt_tokens}: match {item.match_us:.0f} us, "
            f"miss {item.miss_us:.0f} us, acquire and release {item.acquire_release_us:.0f} us, "
            f"publish {item.publish_us:.0f} us, evict {item.evict_us:.2f} us/page"
        )
    worst = max(item.match_us for item in found) / 1e3
    print(f"slowest match {worst:.3f} ms (goal: below {GOAL_MS:.0f} ms)")
    if options.json is not None:
        figures = {"match_ms": worst, "results": [asdict(item) for item in found]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
