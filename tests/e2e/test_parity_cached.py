"""The tokens of one engine without a cache, whatever the caches of two engines hold; and they were really used.

What an engine has cached is told apart by a salt of the test's own; numbers are worked out from the prompts' lengths.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from .conftest import TIGHT_PAGES, Cluster
from .handoffs import GREEDY, SEEDED, HandOff, together, wait_served
from .processes import completion, counters, difference, token_ids, verb, wait_idle
from .prompts import PAGE, ids

PROGRAMS: list[tuple[str, float | None]] = [("prefill_decode", None), ("balanced_prefill_decode", 0.3)]
SAMPLING = {"greedy": GREEDY, "seeded": SEEDED}
LENGTH = 150
RUN = secrets.token_hex(8)
"""Part of every salt: engines may have served an earlier run."""
MAX_TOKENS = 6


def split(length: int, factor: float | None) -> int:
    return length - 1 if factor is None else int((1 - factor) * length)


CACHED = [
    (prefill, decode, "seeded" if number % 2 else "greedy")
    for number, (prefill, decode) in enumerate(
        [
            (0, 0),
            (0, 0),
            (0, LENGTH),
            (LENGTH, 0),
            (LENGTH, LENGTH),
            (100, 64),
            (64, 100),
            (0, 1),
            (0, 15),
            (0, 16),
            (0, 17),
            (0, 33),
            (1, 0),
            (15, 0),
            (17, 0),
            (33, 47),
            (104, 105),
            (106, 104),
        ]
    )
]
"""(tokens that prefill has cached, tokens that decode has, sampling)."""


@dataclass(frozen=True)
class Work:
    """What the engines did for a request: tokens found by prefill and by decode, computed by each, and sent."""

    hit_prefill: int
    hit_decode: int
    computed_prefill: int
    computed_decode: int
    sent: int


def work(cluster: Cluster, before: list[dict[str, Any]]) -> Work:
    after = [counters(url) for url in cluster.engines]

    def moved(name: str) -> list[int]:
        return [difference(old, new, name) for old, new in zip(before, after, strict=True)]

    hits, computed, sent = (moved(n) for n in ("prefix_hit_tokens", "prompt_tokens_computed", "tokens_sent"))
    assert sent[1] == 0
    return Work(hits[0], hits[1], computed[0], computed[1], sent[0])


def expected_work(at_prefill: int, at_decode: int, end: int) -> Work:
    """at_prefill, at_decode: how much of the prompt each has cached.

    Prefill computes from the end of what it has itself, also what decode has: K/V depends on all before it. Decode looks
    up what it is to receive; what it has beyond the split is found by whole pages when it generates.
    """
    matched = min(at_decode, end)
    sent = end - matched
    found = min(at_prefill, end) if sent else 0
    begin = max(end, at_decode // PAGE * PAGE)
    return Work(found, matched + begin - end, end - found if sent else 0, LENGTH - begin, sent)


@pytest.fixture
def parity(
    cluster: Cluster, router_for: Callable[[str, float | None], str], alone: Callable[..., list[int]]
) -> Callable[..., Work]:
    """Runs the prompt through a program with ``prefill`` and ``decode`` tokens of it cached before; what was done."""

    def parity(
        program: tuple[str, float | None], sampling: str, salt: str, prefill: int, decode: int
    ) -> Work:
        body = {"prompt": ids(LENGTH, seed=9), "max_tokens": MAX_TOKENS, **SAMPLING[sampling]}
        for url, length in zip(cluster.engines, (prefill, decode), strict=True):
            if length:
                warm = {**body, "prompt": body["prompt"][:length], "max_tokens": 1}
                completion(url, cache_salt=salt, **warm)
        before = [counters(url) for url in cluster.engines]
        answer = completion(router_for(*program), cache_salt=salt, **body)
        assert token_ids(answer) == alone(**body)
        done = work(cluster, before)
        wait_idle(cluster.engines)
        return done

    return parity


@pytest.mark.case("PD-44")
@pytest.mark.case("PD-28")
@pytest.mark.case("PD-29")
@pytest.mark.case("PD-52")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", PROGRAMS, ids=["apart", "balanced"])
@pytest.mark.parametrize(("prefill", "decode", "sampling"), CACHED)
def test_warm_and_partial(
    prefill: int,
    decode: int,
    sampling: str,
    program: tuple[str, float | None],
    parity: Callable[..., Work],
) -> None:
    salt = f"{RUN}-{prefill}-{decode}-{program}-{sampling}"
    done = parity(program, sampling, salt, prefill, decode)
    assert done == expected_work(prefill, decode, split(LENGTH, program[1]))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", PROGRAMS, ids=["apart", "balanced"])
@pytest.mark.parametrize("warm", [False, True])
def test_shared_prefixes_at_once(
    warm: bool,
    program: tuple[str, float | None],
    cluster: Cluster,
    router_for: Callable[[str, float | None], str],
    alone: Callable[..., list[int]],
) -> None:
    prefix = ids(103, seed=12)
    bodies: list[dict[str, Any]] = [
        {"prompt": prefix + ids(1 + 5 * n, seed=n), "max_tokens": MAX_TOKENS, **sampling}
        for n in range(4)
        for sampling in SAMPLING.values()
    ]
    url, salt = router_for(*program), f"{RUN}-{warm}-{program}"
    if warm:
        for engine in cluster.engines:
            completion(engine, prompt=prefix, max_tokens=1, cache_salt=salt, **GREEDY)
    before = [counters(engine) for engine in cluster.engines]
    assert together(url, [{**body, "cache_salt": salt} for body in bodies]) == [alone(**b) for b in bodies]
    done = work(cluster, before)
    if warm:
        ends = [split(len(body["prompt"]), program[1]) for body in bodies]
        assert done.hit_decode >= sum(min(103, end) for end in ends)
        # The second of two equal prompts may find what the first one left.
        assert done.sent <= sum(end - min(103, end) for end in ends)
    wait_idle(cluster.engines)


@pytest.mark.case("PX-09")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", PROGRAMS, ids=["apart", "balanced"])
def test_eviction_in_a_pool_barely_larger_than_a_request(
    program: tuple[str, float | None], tight: Cluster, start: Any, alone: Callable[..., list[int]]
) -> None:
    wait_served(tight)
    url = router_of(tight, start, program)
    length = (TIGHT_PAGES - 2) * PAGE - 3
    first, second = ({"prompt": ids(length, seed=60 + n), "max_tokens": 6} for n in range(2))
    bodies = [{**first, **GREEDY}, {**second, **SEEDED}, {**first, **GREEDY}]
    before = [counters(engine) for engine in tight.engines]
    for body in bodies:
        assert token_ids(completion(url, **body)) == alone(**body)
    after = [counters(engine) for engine in tight.engines]
    for old, new in zip(before, after, strict=True):
        assert difference(old, new, "evicted_pages") > split(length, program[1]) // PAGE // 2
    wait_idle(tight.engines)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", PROGRAMS, ids=["apart", "balanced"])
def test_preemption_in_the_middle(
    program: tuple[str, float | None], tight: Cluster, start: Any, alone: Callable[..., list[int]]
) -> None:
    """6 requests that each come to need 10 of the 48 pages; they decode for longer than it takes to send all."""
    wait_served(tight)
    url = router_of(tight, start, program)
    bodies = [
        {"prompt": ids(36, seed=80 + n), "max_tokens": 120, **(GREEDY if n % 2 else SEEDED)} for n in range(6)
    ]
    before = counters(tight.decode)
    assert together(url, bodies) == [alone(**body) for body in bodies]
    assert difference(before, counters(tight.decode), "preemptions") > 0
    wait_idle(tight.engines)


def router_of(cluster: Cluster, start: Any, program: tuple[str, float | None]) -> str:
    if program[1] is None:
        return cluster.router
    peers = ["--prefill-peers", cluster.prefill, "--decode-peers", cluster.decode]
    url: str = start.server(
        "router", "--program", program[0], "--set", f"pd_balance_factor={program[1]}", *peers
    )
    return url


@pytest.mark.case("PD-44")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("sampling", list(SAMPLING))
@pytest.mark.parametrize("length", [47, 48, 150])
def test_a_context_that_was_moved(
    length: int, sampling: str, cluster: Cluster, alone: Callable[..., list[int]]
) -> None:
    """`prep_recv` of all of it, `remote_send`, `commit`: then its generation computes one token."""
    seed = length + len(sampling) + 5000
    body: dict[str, Any] = {
        "prompt": ids(length, seed=seed), "max_tokens": MAX_TOKENS, **SAMPLING[sampling]
    }  # fmt: skip
    moved = HandOff(cluster, f"moved-{seed}", body["prompt"], length).prepare()
    assert moved.send().status_code == 200
    committed = verb(cluster.decode, "commit", request_id=moved.request_id)
    assert committed.json() == {"request_id": moved.request_id, "cached_tokens": length}
    before = [counters(engine) for engine in cluster.engines]
    answer = completion(cluster.router, **body)
    assert token_ids(answer) == alone(**body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == length - 1
    assert work(cluster, before) == Work(0, length - 1, 0, 1, 0)
    wait_idle(cluster.engines)
