"""The client leaves at every point of a request where its router waits; nothing of it stays anywhere."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import pytest

from .conftest import Cluster, Starter
from .handoffs import GREEDY, wait_served
from .processes import MODEL, PLAIN, completion, counters, difference, token_ids, wait_idle, wait_until
from .prompts import ids
from .slow_proxy import Hold, SlowProxy, slow_proxies

MAX_TOKENS = 6
ROUNDS = 14
POINTS: list[tuple[str, str | int]] = [
    *itertools.product(("prep_recv", "remote_send", "start_generate"), ("asked", "heard", "answered")),
    *(("start_generate", n) for n in range(1, MAX_TOKENS + 1)),
]
"""15 points, and 14 rounds at each: 210 requests that are left."""


@dataclass
class Held:
    """A router over proxies in front of the tight cluster's engines."""

    url: str
    prefill: SlowProxy
    decode: SlowProxy

    def hold(self, verb: str, moment: str | int) -> Hold:
        proxy = self.prefill if verb == "remote_send" else self.decode
        proxy.hold = hold = Hold(verb, moment)
        return hold


@pytest.fixture(scope="module")
def held(tight: Cluster, start: Starter) -> Iterator[Held]:
    wait_served(tight)
    with slow_proxies(*tight.engines) as (prefill, decode):
        peers = ("--prefill-peers", prefill.url, "--decode-peers", decode.url)
        yield Held(start.server("router", "--program", "prefill_decode", *peers), prefill, decode)


def ask(url: str, prompt: list[int]) -> socket.socket:
    """A streamed request on a connection of its own, whose answer nobody reads."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True, **GREEDY}
    data = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", urlsplit(url).port or 0))
    client.sendall(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    )
    return client


@contextmanager
def under_load(url: str, alone: Callable[..., list[int]]) -> Iterator[None]:
    """Three clients of another router of the engines, that ask all the time and must get the right tokens."""
    over = threading.Event()
    bodies = [{"prompt": ids(30, seed=300 + n), "max_tokens": 5, **GREEDY} for n in range(3)]
    expected = [alone(**body) for body in bodies]

    def client(number: int) -> int:
        asked = 0
        while not over.is_set():
            answer = completion(url, cache_salt=f"load-{number}-{asked}", **bodies[number])
            assert token_ids(answer) == expected[number]
            asked += 1
        return asked

    with ThreadPoolExecutor(len(bodies)) as pool:
        clients = [pool.submit(client, number) for number in range(len(bodies))]
        try:
            yield
        finally:
            over.set()
        assert all(one.result() > 0 for one in clients)


def at_rest(cluster: Cluster, held: Held, alone: Callable[..., list[int]]) -> None:
    """Within a lease: nothing is held anywhere, and the next request is right."""
    wait_idle(cluster.engines)
    wait_until(lambda: _in_flight(held.url) == 0, 2, "the router has nothing in flight")
    body = {"prompt": ids(33, seed=3), "max_tokens": 5, **GREEDY}
    before = counters(cluster.prefill)
    answer = completion(held.url, cache_salt=f"next-{before['tokens_sent']}", **body)
    assert token_ids(answer) == alone(**body)
    assert difference(before, counters(cluster.prefill), "tokens_sent") == 32


def _in_flight(url: str) -> int:
    return int(httpx.get(f"{url}/router/stats", timeout=5, verify=PLAIN).json()["requests_in_flight"])


@pytest.mark.case("PD-01")
@pytest.mark.case("PD-09")
@pytest.mark.case("PD-13")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("verb", "moment"), POINTS, ids=lambda value: str(value))
def test_the_client_leaves(
    verb: str, moment: str | int, held: Held, tight: Cluster, alone: Callable[..., list[int]]
) -> None:
    def rounds(first: int, last: int) -> None:
        for number in range(first, last):
            # Every other one is heard of after its abort, the others while the router still waits.
            hold = held.hold(verb, moment)
            client = ask(held.url, ids(40, seed=1 + POINTS.index((verb, moment)) * 100 + number))
            assert hold.reached.wait(20), (verb, moment)
            if number % 2:
                hold.let_go.set()
            client.close()
            wait_until(lambda: _in_flight(held.url) == 0, 5, "the router let go")
            hold.let_go.set()

    rounds(0, ROUNDS // 2)
    at_rest(tight, held, alone)
    with under_load(tight.router, alone):
        rounds(ROUNDS // 2, ROUNDS)
    at_rest(tight, held, alone)
