"""Mixed requests, aborts and a prefill engine that is killed again and again: every counter at rest, memory flat.

The suite runs 96 requests. A long run, with the figures of every part of it in a file:

    SOAK_REQUESTS=2000 SOAK_JSON=soak.json pytest tests/e2e/test_soak.py
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Cluster
from .handoffs import GREEDY, SEEDED, wait_served
from .processes import MODEL, PLAIN, load, resident_bytes, wait_idle, wait_until
from .prompts import ids

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "96"))
PARTS = 6
PARTS_WITH_A_KILL = (1, 3)
AT_ONCE = 6
PREFIX = ids(90, seed=5)
TOKENS = 5
SERVED_WITHIN_S = 300
"""A killed engine comes back in seconds, but for a first start after its kernels changed."""
GROWTH_BYTES = 24 * 2**20
"""What a process may have more at the end than after its first whole part of the run: allocators, not leaks, for any
number of requests."""
FIRST_PARTS = {"decode-0": 1, "router": 1, "prefill-0": PARTS_WITH_A_KILL[-1] + 1}


def bodies() -> dict[str, list[dict[str, Any]]]:
    """kind -> requests of it; the same ones again and again, so that their tokens are known."""
    shared = [PREFIX + ids(3 + 7 * n, seed=n) for n in range(6)]
    return {
        "short": [{"prompt": ids(2 + 5 * n, seed=20 + n), "max_tokens": TOKENS} for n in range(6)],
        "long": [{"prompt": ids(300 + 100 * n, seed=30 + n), "max_tokens": TOKENS} for n in range(2)],
        "shared": [{"prompt": prompt, "max_tokens": TOKENS} for prompt in shared],
        "aborted": [{"prompt": ids(20 + 60 * n, seed=40 + n), "max_tokens": 200} for n in range(4)],
        "over-long": [{"prompt": [7] * 3000, "max_tokens": TOKENS}],
    }


SHARES = {"short": 8, "long": 1, "shared": 6, "aborted": 4, "over-long": 1}


@dataclass(frozen=True)
class Request:
    kind: str
    body: dict[str, Any]
    leaves_after: int
    """Aborted ones: events that the client reads; 0 = it leaves while it waits for the first."""


def requests(count: int) -> list[Request]:
    chosen, kinds = random.Random(4), bodies()
    made = []
    for kind in chosen.choices(list(SHARES), list(SHARES.values()), k=count):
        body = {**chosen.choice(kinds[kind]), **chosen.choice([GREEDY, SEEDED])}
        made.append(Request(kind, body, chosen.randrange(6)))
    return made


def ask(url: str, request: Request, expected: Callable[..., list[int]]) -> Counter[str]:
    """How it ended: ``ok``, ``aborted``, or the status of its error; after a 502 or 503 it is asked again, as clients do.
    Asserts that what it got is right."""
    endings: Counter[str] = Counter()
    body = {"model": MODEL, "return_token_ids": True, **request.body}
    if request.kind == "aborted":
        endings[leave(url, {**body, "stream": True}, request.leaves_after)] += 1
        return endings

    def served() -> bool:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, verify=PLAIN)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["token_ids"] == expected(**request.body)
            endings["ok"] += 1
            return True
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        endings[str(answer.status_code)] += 1
        return answer.status_code not in (502, 503)

    wait_until(served, SERVED_WITHIN_S, "served")
    return endings


def leave(url: str, body: dict[str, Any], after: int) -> str:
    timeout = httpx.Timeout(60, read=60 if after else 0.03)
    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=timeout, verify=PLAIN
        ) as answer:
            lines = answer.iter_lines()
            for _ in range(after):
                next(lines, None)
    except httpx.ReadTimeout:
        pass
    return "aborted"


@dataclass(frozen=True)
class Figures:
    """After so many requests, at rest."""

    requests: int
    endings: dict[str, int]
    resident: dict[str, int]
    pages: dict[str, dict[str, int]]


def figures(cluster: Cluster, asked: int, endings: Counter[str]) -> Figures:
    resident = {name: resident_bytes(cluster.pid(name)) for name in FIRST_PARTS}
    pages = {
        url: {name: value for name, value in load(url).items() if name.endswith("_pages")}
        for url in cluster.engines
    }
    return Figures(asked, dict(endings), resident, pages)


def kill_when_sending(cluster: Cluster) -> None:
    wait_until(lambda: load(cluster.decode)["leases"]["writing"] > 0, 20, "something is sent")
    os.kill(cluster.pid("prefill-0"), signal.SIGKILL)


@pytest.mark.timeout(300 + 2 * REQUESTS)
@pytest.mark.case("PD-20")
@pytest.mark.case("PD-18")
@pytest.mark.case("PD-07")
@pytest.mark.case("PX-11")
def test_soak(tight: Cluster, alone: Callable[..., list[int]]) -> None:
    wait_served(tight)
    everything, decode_pid = requests(REQUESTS), tight.pid("decode-0")
    for request in everything:
        if request.kind not in ("aborted", "over-long"):
            alone(**request.body)
    endings: Counter[str] = Counter()
    history = []
    size = REQUESTS // PARTS
    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        for part in range(PARTS):
            asked = [
                pool.submit(ask, tight.router, request, alone)
                for request in everything[part * size : (part + 1) * size]
            ]
            if part in PARTS_WITH_A_KILL:
                kill_when_sending(tight)
            for one in asked:
                endings.update(one.result())
            wait_served(tight, SERVED_WITHIN_S)
            wait_idle(tight.engines)
            history.append(figures(tight, (part + 1) * size, endings))
            if target := os.environ.get("SOAK_JSON"):
                Path(target).write_text(json.dumps([vars(entry) for entry in history], indent=1))
    kinds = Counter(request.kind for request in everything[: size * PARTS])
    assert endings["aborted"] == kinds["aborted"]
    assert endings["400"] == kinds["over-long"]
    assert set(endings) <= {"ok", "aborted", "400", "502", "503"}
    assert endings["ok"] == sum(kinds[kind] for kind in ("short", "long", "shared"))
    assert tight.pid("decode-0") == decode_pid
    for name, first in FIRST_PARTS.items():
        grown = history[-1].resident[name] - history[first].resident[name]
        assert grown < GROWTH_BYTES, [entry.resident for entry in history]
