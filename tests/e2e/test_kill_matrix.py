"""Every fault at every stage of a request, of either role, under every shipped program: clients see nothing of it.

Each cell runs requests at once, streamed and not, greedy and seeded; the fault comes at an exact point of one of them.
The suite runs some of the cells, the programs taking turns. All of them:

    KILL_MATRIX=all pytest tests/e2e/test_kill_matrix.py
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Starter
from .fault_proxy import FaultProxy, Moment, Trigger
from .pairs import NAMES, Pairs, ask, ask_all, post, router_command, running_pairs, wait_receiving
from .processes import PLAIN, Process, counters, free_port, wait_until

ALL = os.environ.get("KILL_MATRIX") == "all"
MLC_FILE = Path(__file__).parents[1] / "program" / "data" / "mlc_router.py"
PROGRAMS: dict[str, tuple[str | Path, dict[str, object]]] = {
    "prefill_decode": ("prefill_decode", {}),
    "balanced": ("balanced_prefill_decode", {"pd_balance_factor": 0.3}),
    "auto": ("balanced_prefill_decode", {"pd_balance_factor": "auto"}),
    "adaptive": ("adaptive", {"apart": True, "ttft_ms": 1e9, "itl_ms": 1e9}),
    "migration": ("context_migration", {"slack": -9}),
    "mlc": (MLC_FILE, {}),
    "round_robin": ("round_robin", {}),
    "prefix": ("prefix_aware", {}),
    "exact": ("prefix_aware", {"exact": True}),
}
WHOLE = ("round_robin", "prefix", "exact")
"""Programs that know no transfer."""
FAULTS = ("kill", "stop", "cut", "slow")
ROLES = ("prefill", "decode")
STAGES = ("before", "between", "transfer", "stream")
SLOW_S = 0.03
TOKENS = 24
LONG = 1500
"""Tokens of a prompt that is computed in many chunks."""


def prompt(length: int, seed: int) -> list[int]:
    """Tokens of the tiny vocabulary."""
    return [(seed * 7919 + n * n * 31 + n * 17) % 250 for n in range(length)]


BODIES: list[dict[str, Any]] = [
    {"prompt": prompt(length, length), "max_tokens": TOKENS, "stream": streamed, **sampling}
    for length, streamed, sampling in (
        (1, True, {"temperature": 0}),
        (2, True, {"temperature": 0.9, "seed": 5}),
        (40, True, {"temperature": 0.9, "seed": 6}),
        (65, False, {"temperature": 0}),
        (LONG, True, {"temperature": 0}),
        (LONG + 1, True, {"temperature": 0.9, "seed": 7}),
        (LONG + 40, False, {"temperature": 0.9, "seed": 8}),
    )
]


@dataclass(frozen=True)
class Cell:
    program: str
    fault: str
    role: str
    stage: str

    def __str__(self) -> str:
        return f"{self.program}-{self.fault}-{self.role}-{self.stage}"


def standing() -> list[tuple[str, str, str]]:
    """Points of the suite: a kill at all of them, other faults here and there."""
    sides = list(zip(STAGES, itertools.cycle(ROLES), itertools.cycle(ROLES[::-1])))
    points = list(itertools.product(("kill",), ROLES, STAGES))
    points += [("stop", role, stage) for stage, role, _ in sides]
    points += [("cut", role, stage) for stage, _, role in sides]
    return [*points, ("slow", "prefill", "transfer"), ("slow", "decode", "stream")]


def cells() -> list[Cell]:
    """In such an order that a part of them has a part of every kind."""
    points = list(itertools.product(FAULTS, ROLES, STAGES)) if ALL else standing()
    programs = list(PROGRAMS)
    return [
        Cell(programs[(number + turn) % len(programs)], *point)
        for turn in range(len(programs) if ALL else 1)
        for number, point in enumerate(points)
    ]


@pytest.fixture(scope="module")
def pairs(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with running_pairs(start, tmp_path_factory.mktemp("pairs")) as pairs:
        yield pairs


def point(pairs: Pairs, cell: Cell) -> tuple[str, Moment, list[FaultProxy]]:
    """Where the fault comes: the verb, the moment, and at whose proxies."""
    if cell.program in WHOLE:
        moments: dict[str, Moment] = {
            "before": "asked",
            "between": "answered",
            "transfer": "heard",
            "stream": 3,
        }
        return "start_generate", moments[cell.stage], pairs.of(cell.role)
    migrates = cell.program == "migration"  # from and to any engine
    senders = list(pairs.proxies.values()) if migrates else pairs.of("prefill")
    receivers = list(pairs.proxies.values()) if migrates else pairs.of("decode")
    points: dict[tuple[str, str], tuple[str, Moment, list[FaultProxy]]] = {
        ("prefill", "before"): ("prep_recv", "asked", receivers),
        ("prefill", "between"): ("remote_send", "asked", senders),
        ("prefill", "transfer"): ("remote_send", "heard", senders),
        ("prefill", "stream"): ("start_generate", 3, receivers),
        ("decode", "before"): ("prep_recv", "asked", receivers),
        ("decode", "between"): ("prep_recv", "answered", receivers),
        ("decode", "transfer"): ("remote_send", "heard", senders),
        ("decode", "stream"): ("start_generate", 3, receivers),
    }
    return points[cell.role, cell.stage]


def victim(pairs: Pairs, cell: Cell, reached: FaultProxy) -> FaultProxy:
    """Who is struck: whose request came to the point, or its partner. In mid-transfer, when one is under way."""
    if cell.program in WHOLE:
        return reached
    if cell.stage == "transfer":
        if cell.program == "migration" and cell.role == "prefill":
            return reached  # what is cached is sent in no time: to look would be too late
        others = [proxy for proxy in pairs.proxies.values() if proxy is not reached]
        receiver = wait_receiving(others, done_too=cell.program == "migration")
        return reached if cell.role == "prefill" else receiver
    if cell.role == "decode" or cell.stage == "between":
        return reached
    return next(proxy for proxy in pairs.of("prefill") if proxy is not reached)


def strike(pairs: Pairs, fault: str, victim: FaultProxy) -> None:
    if fault == "kill":
        pairs.engines.kill(victim.name)
    elif fault == "stop":
        pairs.engines.stop(victim.name)
    elif fault == "cut":
        victim.cut()
    else:
        victim.delay_s = SLOW_S


@contextlib.contextmanager
def armed(pairs: Pairs, cell: Cell) -> Iterator[Trigger]:
    def act(reached: FaultProxy) -> None:
        strike(pairs, cell.fault, victim(pairs, cell, reached))

    length = 3 * LONG if cell.stage == "transfer" and cell.program not in WHOLE else 0
    trigger = Trigger(*point(pairs, cell), act, length)
    try:
        with pairs.watched_by(trigger):
            yield trigger
    finally:
        for proxy in pairs.proxies.values():
            proxy.delay_s = 0.0
        pairs.engines.heal()


@pytest.mark.timeout(300)
@pytest.mark.case("PD-05")
@pytest.mark.case("PD-34")
@pytest.mark.case("RT-06")
@pytest.mark.case("RT-12")
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_clients_see_nothing_of_it(cell: Cell, pairs: Pairs) -> None:
    pairs.wait_at_rest()
    pairs.deploy(*PROGRAMS[cell.program])
    expected = [pairs.expected(body) for body in BODIES]
    salt = secrets.token_hex(8)
    if cell.program == "migration":  # there is something to be moved
        holder = "prefill-0" if cell.role == "prefill" else "prefill-1"
        ask_all(pairs.engines.url(holder), [{**body, "max_tokens": 1} for body in BODIES], cache_salt=salt)
    with armed(pairs, cell) as trigger:
        answers = ask_all(pairs.router, BODIES, cache_salt=salt)
        assert trigger.done.wait(30), "the point was never reached"
        assert trigger.struck
    assert answers == expected
    pairs.wait_at_rest()


@contextlib.contextmanager
def own_router(pairs: Pairs, folder: Path, *more: str) -> Iterator[tuple[str, Process]]:
    """A router beside the one that all share; it may end. It may answer although it is not ready."""
    port = free_port()
    process = Process(*router_command(pairs.proxies), "--port", str(port), *more, log=folder / "router.log")
    url = f"http://127.0.0.1:{port}"
    try:
        process.wait(lambda: is_up(url), 60)
        yield url, process
    finally:
        process.stop()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, verify=PLAIN).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.timeout(300)
@pytest.mark.case("PD-09")
@pytest.mark.case("PD-50")
@pytest.mark.parametrize(
    ("verb", "moment", "length"),
    [("prep_recv", "answered", 0), ("remote_send", "heard", 3 * LONG), ("start_generate", 3, 0)],
    ids=["between", "transfer", "stream"],
)
def test_the_router_dies_and_another_one_takes_over(
    verb: str, moment: Moment, length: int, pairs: Pairs, tmp_path: Path
) -> None:
    pairs.wait_at_rest()
    with own_router(pairs, tmp_path) as (url, router), ThreadPoolExecutor(len(BODIES)) as pool:

        def act(_: FaultProxy) -> None:
            if moment == "heard":
                wait_receiving(pairs.of("decode"))
            router.kill()

        trigger = Trigger(verb, moment, list(pairs.proxies.values()), act, length)
        with pairs.watched_by(trigger):
            answers = [
                pool.submit(ask, url, {**body, "max_tokens": 2000, "cache_salt": secrets.token_hex(8)})
                for body in BODIES
            ]
            assert trigger.done.wait(30)
            assert trigger.struck
            failures = [answer.exception() for answer in answers]
    assert all(isinstance(failure, httpx.TransportError) for failure in failures), failures
    pairs.wait_at_rest()
    with own_router(pairs, tmp_path) as (url, _):
        assert ask_all(url, BODIES, cache_salt=secrets.token_hex(8)) == [
            pairs.expected(body) for body in BODIES
        ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ROLES)
def test_all_engines_of_a_role_die_and_one_comes_late(role: str, pairs: Pairs, tmp_path: Path) -> None:
    """Both for the router that knew them and for one that never saw them."""
    pairs.wait_at_rest()
    pairs.deploy("prefill_decode", {})
    body = {**BODIES[2], "stream": False}
    expected = pairs.expected(body)
    try:
        for proxy in pairs.of(role):
            pairs.engines.kill(proxy.name)
        with own_router(pairs, tmp_path, "--allow-missing-peers") as (late, _):
            for url in (pairs.router, late):
                assert unserved(url, body) == {(503, True)}
            pairs.engines.start(f"{role}-1")
            for url in (pairs.router, late):
                wait_until(partial(serves, url, body, expected), 60, "served again")
    finally:
        pairs.engines.heal()
    pairs.wait_at_rest()


@pytest.mark.timeout(300)
def test_engines_change_sides_under_load_and_nothing_is_lost(pairs: Pairs) -> None:
    """Each is asked for its new part of the work while requests run that know its old one."""
    pairs.wait_at_rest()
    pairs.deploy("prefill_decode", {})
    expected = [pairs.expected(body) for body in BODIES]
    moves = [
        ("prefill-1", "decode"),
        ("prefill-1", "prefill"),
        ("decode-1", "prefill"),
        ("decode-1", "decode"),
    ]
    over = threading.Event()

    def keep_asking() -> int:
        rounds = 0
        while not over.is_set():
            assert ask_all(pairs.router, BODIES, cache_salt=secrets.token_hex(8)) == expected
            rounds += 1
        return rounds

    def done(engine: str, role: str) -> int:
        """How much it has done of what only this role does."""
        name = "output_tokens" if role == "decode" else "tokens_sent"
        return counters(pairs.engines.url(engine))[name]

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(keep_asking)
        try:
            for engine, role in moves:
                before = done(engine, role)
                answer = pairs.admin.patch(f"/admin/engines/{engine}", json={"role": role})
                assert answer.status_code == 200, answer.text
                wait_until(lambda: asking.done() or done(engine, role) > before, 60, f"{engine} as {role}")  # noqa: B023 - at once
        finally:
            over.set()
            for engine in NAMES:
                pairs.admin.patch(f"/admin/engines/{engine}", json={"role": engine.rpartition("-")[0]})
        assert asking.result() > 1
    pairs.wait_at_rest()


def unserved(url: str, body: dict[str, Any]) -> set[tuple[int, bool]]:
    """Status, and whether it is said when to come again, of requests at once."""
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: post(url, body), range(8))
        return {(answer.status_code, "retry-after" in answer.headers) for answer in answers}


def serves(url: str, body: dict[str, Any], expected: list[int]) -> bool:
    """Whether it is answered; the answer must be right."""
    answer = post(url, body)
    if answer.status_code == 503:
        return False
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected
    return True
