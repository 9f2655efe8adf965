"""Cases of the list that need real processes: a router that is killed, one request id for many, repeats, hash seeds."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .conftest import Cluster, Starter
from .handoffs import GREEDY, SEEDED, HandOff, stopped_sender, together, wait_served
from .processes import MODEL, PLAIN, completion, counters, difference, load, token_ids, wait_idle, wait_until
from .prompts import ids

Alone = Callable[..., list[int]]
RouterFor = Callable[[str, float | None], str]


def ended(url: str, body: dict[str, Any]) -> bool:
    """Ask, and have an answer or an error."""
    try:
        return (
            httpx.post(
                f"{url}/v1/completions", json={"model": MODEL, **body}, timeout=60, verify=PLAIN
            ).status_code
            > 0
        )
    except httpx.TransportError:
        return True


@pytest.mark.case("PD-01")
@pytest.mark.case("PD-50")
@pytest.mark.timeout(200)
def test_a_router_is_killed_with_requests_at_every_stage(tight: Cluster, alone: Alone) -> None:
    wait_served(tight)
    bodies = [{"prompt": ids(30 + 15 * n, seed=600 + n), "max_tokens": 40, **GREEDY} for n in range(20)]
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(ended, tight.router, body) for body in bodies]
        wait_until(
            lambda: load(tight.decode)["running"] > 1 and load(tight.decode)["reserved"] > 0, 20, "stages"
        )
        os.kill(tight.pid("router"), signal.SIGKILL)
        assert all(one.result() for one in asked)
    wait_idle(tight.engines)
    wait_served(tight)
    body = bodies[3] | {"max_tokens": 6}
    assert token_ids(completion(tight.router, **body)) == alone(**body)


def streamed(url: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[list[int], str]:
    """The token ids of a stream, and the request id of its answer."""
    tokens: list[int] = []
    request = {"model": MODEL, "stream": True, "return_token_ids": True, **body}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=request, headers=headers, timeout=60, verify=PLAIN
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids", [])
    return tokens, answer.headers["x-request-id"]


@pytest.mark.case("PD-15")
@pytest.mark.timeout(200)
def test_many_streams_with_one_request_id(cluster: Cluster, alone: Alone) -> None:
    bodies = [{"prompt": ids(20 + n, seed=700 + n), "max_tokens": 5, **GREEDY} for n in range(20)]
    expected = [alone(**body) for body in bodies]
    headers = {"x-request-id": "same"}
    with ThreadPoolExecutor(20) as pool:
        answers = pool.map(lambda body: streamed(cluster.router, {**body, "user": "same"}, headers), bodies)
        assert list(answers) == [(tokens, "same") for tokens in expected]
    wait_idle(cluster.engines)


@pytest.mark.case("PD-28")
@pytest.mark.case("PX-15")
@pytest.mark.timeout(100)
@pytest.mark.parametrize("length", [193, 200])
def test_the_same_request_three_times(length: int, cluster: Cluster, alone: Alone) -> None:
    body = {"prompt": ids(length, seed=800 + length), "max_tokens": 5, **GREEDY}
    expected, salt = alone(**body), secrets.token_hex(8)
    for time in range(3):
        before = [counters(engine) for engine in cluster.engines]
        assert token_ids(completion(cluster.router, cache_salt=salt, **body)) == expected
        after = [counters(engine) for engine in cluster.engines]
        computed = [
            difference(old, new, "prompt_tokens_computed") for old, new in zip(before, after, strict=True)
        ]
        assert computed == ([length - 1, 1] if time == 0 else [0, 1])
    wait_idle(cluster.engines)


@pytest.mark.case("PD-28")
@pytest.mark.case("PX-09")
@pytest.mark.timeout(200)
def test_a_matched_prefix_is_pinned_until_it_is_used(tight: Cluster, alone: Alone) -> None:
    """Between `prep_recv`, which found everything, and `start_generate` others want every page."""
    wait_served(tight)
    prompt = ids(160, seed=900)
    body = {"prompt": prompt, "max_tokens": 5, **GREEDY}
    assert token_ids(completion(tight.decode, **body)) == alone(**body)
    floods = [{"prompt": ids(500, seed=901 + n), "max_tokens": 2, **GREEDY} for n in range(2)]
    expected = [alone(**flood) for flood in floods]
    full = HandOff(tight, "pinned", prompt, 159).prepare()
    assert full.matched == 159
    before = counters(tight.decode)
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(together, tight.decode, floods, 1)
        wait_until(lambda: full.renew() and flooding.done(), 60, "flooded")
        assert flooding.result() == expected
    assert difference(before, counters(tight.decode), "evicted_pages") > 0
    before = counters(tight.decode)
    answer = full.generate(**{name: value for name, value in body.items() if name != "prompt"})
    assert answer.status_code == 200, answer.text
    assert token_ids(answer.json()) == alone(**body)
    assert difference(before, counters(tight.decode), "prompt_tokens_computed") == 1
    wait_idle(tight.engines)


@pytest.mark.case("PD-29")
@pytest.mark.timeout(200)
def test_the_cached_prefix_is_longer_than_the_split(
    cluster: Cluster, router_for: RouterFor, alone: Alone
) -> None:
    body = {"prompt": ids(140, seed=950), "max_tokens": 5, **GREEDY}
    expected = alone(**body)
    for factor in (0.0, 0.9, 0.5, 1.0):
        url = router_for("balanced_prefill_decode", factor)
        assert token_ids(completion(url, **body)) == expected
    wait_idle(cluster.engines)


@pytest.mark.case("PD-30")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", [("prefill_decode", None), ("balanced_prefill_decode", 0.5)])
def test_few_tokens_are_exactly_so_many(
    program: tuple[str, float | None], cluster: Cluster, router_for: RouterFor, alone: Alone
) -> None:
    url = router_for(*program)
    for wanted in (1, 2, 3):
        body = {"prompt": ids(50, seed=970 + wanted), "max_tokens": wanted, **SEEDED}
        answer = completion(url, **body)
        assert token_ids(answer) == alone(**body)
        assert answer["usage"]["completion_tokens"] == wanted
        assert answer["choices"][0]["finish_reason"] == "length"
        assert streamed(url, body, {})[0] == alone(**body)
    wait_idle(cluster.engines)


@pytest.mark.case("PD-32")
@pytest.mark.timeout(200)
def test_what_was_received_waits_for_room(tight: Cluster, alone: Alone) -> None:
    """The decode engine is full when a received request is to start: its K/V is kept, and computed once."""
    wait_served(tight)
    body = {"prompt": ids(97, seed=980), "max_tokens": 5, **GREEDY}
    long = {"prompt": ids(16, seed=981), "max_tokens": 180, **GREEDY}
    alone(**body)
    received = HandOff(tight, "waits", body["prompt"], 96).prepare()
    before = [counters(engine) for engine in tight.engines]
    assert received.send().status_code == 200
    with ThreadPoolExecutor(5) as pool:
        streams = [
            pool.submit(completion, tight.decode, cache_salt=f"long-{number}", **long) for number in range(4)
        ]
        wait_until(lambda: received.renew() and load(tight.decode)["running"] == 4, 20, "running")
        answer = received.generate(**{name: value for name, value in body.items() if name != "prompt"})
        assert answer.status_code == 200, answer.text
        assert token_ids(answer.json()) == alone(**body)
        outputs = {tuple(token_ids(stream.result())) for stream in streams}
    after = [counters(engine) for engine in tight.engines]
    computed = [difference(b, a, "prompt_tokens_computed") for b, a in zip(before, after, strict=True)]
    recomputed = difference(before[1], after[1], "recomputed_tokens")
    assert outputs == {tuple(alone(**long))}
    assert computed[0] == 96
    assert 1 + 4 * 16 <= computed[1] <= 1 + 4 * 16 + recomputed
    wait_idle(tight.engines)


@pytest.mark.case("PD-40")
@pytest.mark.timeout(200)
def test_a_stopped_sender_does_not_stop_other_streams(tight: Cluster, alone: Alone) -> None:
    wait_served(tight)
    bodies = [{"prompt": ids(20, seed=990 + n), "max_tokens": 20, **GREEDY} for n in range(3)]
    expected = [alone(**body) for body in bodies]
    with (
        ThreadPoolExecutor(1) as pool,
        stopped_sender(tight, pool, ids(300, seed=989), sent=0) as (stalled, sending),
    ):
        assert together(tight.decode, bodies) == expected
        stalled.abort_receiver()
        assert load(tight.decode)["quarantined_pages"] == 19
        assert together(tight.decode, bodies) == expected
    assert sending.result().status_code == 409
    wait_served(tight)
    wait_idle(tight.engines)


@pytest.mark.case("PX-11")
@pytest.mark.timeout(200)
def test_shared_prefix_with_aborts(tight: Cluster, alone: Alone) -> None:
    wait_served(tight)
    prefix = ids(100, seed=1100)
    bodies = [{"prompt": prefix + ids(1 + n, seed=n), "max_tokens": 6, **GREEDY} for n in range(8)]
    expected = [alone(**body) for body in bodies]

    def leave(number: int) -> None:
        request = {"model": MODEL, **bodies[number % 8], "max_tokens": 100, "stream": True}
        with httpx.stream(
            "POST", f"{tight.router}/v1/completions", json=request, timeout=60, verify=PLAIN
        ) as answer:
            next(answer.iter_lines(), None)

    with ThreadPoolExecutor(8) as pool:
        leaving = [pool.submit(leave, number) for number in range(26)]
        staying = [pool.submit(completion, tight.router, **bodies[n % 8]) for n in range(24)]
        assert [token_ids(one.result()) for one in staying] == [expected[n % 8] for n in range(24)]
        for one in leaving:
            one.result()
    wait_idle(tight.engines)


@pytest.mark.case("PX-17")
@pytest.mark.timeout(200)
def test_prefixes_are_found_whatever_the_hash_seeds(cluster: Cluster, start: Starter) -> None:
    """Every process of the tests has a hash seed of its own, drawn by its interpreter."""
    assert "PYTHONHASHSEED" not in os.environ
    peers = ("--prefill-peers", cluster.prefill, "--decode-peers", cluster.decode)
    url = start.server("router", "--program", "prefix_aware", *peers)
    body = {"prompt": ids(120, seed=1200), "max_tokens": 2, **GREEDY}
    completion(url, **body)
    again = completion(url, **body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 119
    wait_idle(cluster.engines)


@pytest.mark.case("MT-03")
@pytest.mark.timeout(100)
def test_choices_are_not_requests(cluster: Cluster) -> None:
    def ended() -> float:
        lines = httpx.get(f"{cluster.router}/metrics", timeout=10, verify=PLAIN).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(REQUESTS_TOTAL))

    before = ended()
    for number in range(3):
        answer = completion(
            cluster.router, prompt=ids(20, seed=1300 + number), n=3, max_tokens=2, temperature=0.9, seed=5
        )
        assert len(answer["choices"]) == 3
    wait_until(lambda: ended() - before == 3, 5, "three requests are counted")
    wait_idle(cluster.engines)


REQUESTS_TOTAL = "microserving_router_requests_total"
