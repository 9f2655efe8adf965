"""The adaptive program on real engines: patterns and roles follow a workload that turns, and every answer stays right.

Objectives are set once, to a quarter of what these engines take for one request, and then the traffic alone decides:
with long prompts and one token each only the first token can be late, with short prompts and long outputs only the others.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Cluster, Starter
from .processes import MODEL, wait_idle, wait_until
from .prompts import ids

Ask = Callable[[dict[str, Any]], list[int]]
PATIENCE_S = 90
CLIENTS = 4
LONG_PROMPTS: list[dict[str, Any]] = [
    {"prompt": ids(330 + n, seed=60 + n), "max_tokens": 1} for n in range(3)
]
LONG_OUTPUTS: list[dict[str, Any]] = [{"prompt": ids(6 + n, seed=70 + n), "max_tokens": 24} for n in range(3)]
SAMPLING = {"temperature": 0.7, "seed": 5, "ignore_eos": True}


def body_of(work: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "stream": True, "return_token_ids": True, **SAMPLING, **work}


def arrivals(url: str, body: dict[str, Any]) -> tuple[list[int], list[float]]:
    """The token ids of a stream, and when each piece of it came, in seconds after the request."""
    tokens: list[int] = []
    times: list[float] = []
    began = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/completions", json=body_of(body), timeout=100) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                times.append(time.monotonic() - began)
                tokens += choices[0].get("token_ids", [])
    return tokens, times


class Traffic:
    """Streams without a pause, with a salt of its own each (nothing is cached), compared with what is ``expected``."""

    def __init__(self, url: str, expected: Ask) -> None:
        self._url = url
        self._expected = expected
        self._salts = itertools.count()

    @contextmanager
    def of(self, bodies: list[dict[str, Any]]) -> Iterator[None]:
        """While the block runs. Raises AssertionError at its end when an answer was wrong."""
        over = threading.Event()
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._keep_asking, bodies[n % len(bodies)], over) for n in range(CLIENTS)]
            try:
                yield
            finally:
                over.set()
        assert all(client.result() > 0 for client in clients)

    def _keep_asking(self, body: dict[str, Any], over: threading.Event) -> int:
        """Until told; returns how often."""
        wanted, asked = self._expected(body), 0
        while not over.is_set():
            salted = {**body, "cache_salt": f"adaptive-{next(self._salts)}"}
            assert arrivals(self._url, salted)[0] == wanted
            asked += 1
        return asked


@pytest.mark.timeout(400)
def test_roles_follow_a_workload_that_turns(
    start: Starter, cluster: Cluster, alone: Callable[..., list[int]], tmp_path: Path
) -> None:
    peers = f"{cluster.prefill},{cluster.decode}"  # each is a peer of both kinds: of no role at first
    admin = tmp_path / "admin.sock"
    url = start.server(
        "router", "--program", "round_robin", f"--prefill-peers={peers}", f"--decode-peers={peers}",
        f"--admin-socket={admin}",
    )  # fmt: skip

    def expected(body: dict[str, Any]) -> list[int]:
        return alone(**SAMPLING, **body)

    for body in (*LONG_PROMPTS, *LONG_OUTPUTS):
        expected(body)
    first_s = arrivals(url, LONG_PROMPTS[0])[1][0]
    _, times = arrivals(url, LONG_OUTPUTS[0])
    settings = {
        "ttft_ms": 1000 * first_s / 4,
        "itl_ms": 1000 * (times[-1] - times[0]) / LONG_OUTPUTS[0]["max_tokens"] / 4,
        "quantile": 0.5,
        "interval_s": 0.2,
    }

    def stats() -> dict[str, Any]:
        shown: dict[str, Any] = httpx.get(f"{url}/router/stats", timeout=30).json()
        return shown

    def roles() -> set[str]:
        return {engine["role"] for engine in stats()["engines"]}

    with httpx.Client(transport=httpx.HTTPTransport(uds=str(admin)), base_url="http://router") as client:
        answer = client.post(
            "/admin/program/deploy", json={"path": "adaptive", "settings": settings}, timeout=60
        )
    assert answer.status_code == 200, answer.text
    assert (roles(), stats()["program"]["settings"]["apart"]) == ({"hybrid"}, False)

    traffic = Traffic(url, expected)
    with traffic.of(LONG_OUTPUTS):
        wait_until(
            lambda: bool(stats()["program"]["settings"]["apart"]), PATIENCE_S, "prompts and outputs apart"
        )
        wait_until(lambda: "decode" in roles(), PATIENCE_S, "an engine for outputs")
    with traffic.of(LONG_PROMPTS):
        wait_until(lambda: "prefill" in roles(), PATIENCE_S, "an engine for prompts")
    with traffic.of(LONG_OUTPUTS):
        wait_until(lambda: "decode" in roles(), PATIENCE_S, "an engine for outputs again")
    wait_idle(cluster.engines)
