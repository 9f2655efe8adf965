"""A sender that was stopped for longer than the lease, and then wakes or dies: nobody's tokens change."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import TIGHT_PAGES, Cluster
from .handoffs import GREEDY, go_on, stopped_sender, together, wait_served
from .processes import counters, difference, load, wait_idle, wait_until
from .prompts import ids

LENGTH = 400
QUARANTINED = 25  # pages of 399 positions


def others(seed: int) -> list[dict[str, Any]]:
    """7 requests of 4 pages each: more than the decode engine has beside the quarantined ones."""
    return [{"prompt": ids(50, seed=seed + n), "max_tokens": 14, **GREEDY} for n in range(7)]


def salted(bodies: list[dict[str, Any]], salt: str) -> list[dict[str, Any]]:
    return [{**body, "cache_salt": salt} for body in bodies]


@pytest.mark.timeout(200)
@pytest.mark.case("PD-03")
@pytest.mark.case("PD-40")
@pytest.mark.parametrize(("sent", "ending"), [(0, "wakes"), (128, "wakes"), (128, "dies")])
def test_late_writes(sent: int, ending: str, tight: Cluster, alone: Callable[..., list[int]]) -> None:
    early, late = others(100), others(200)
    expected_early, expected_late = ([alone(**body) for body in bodies] for bodies in (early, late))
    early, late = (salted(bodies, f"{sent}-{ending}") for bodies in (early, late))
    wait_served(tight)
    before = counters(tight.decode)
    with (
        ThreadPoolExecutor(2) as pool,
        stopped_sender(tight, pool, ids(LENGTH, seed=1000 * sent + len(ending)), sent=sent) as (
            hand_off,
            sending,
        ),
    ):
        wait_until(lambda: load(tight.decode)["quarantined_pages"] == QUARANTINED, 5, "expired")
        assert difference(before, counters(tight.decode), "leases_expired") == 1
        assert together(tight.decode, early) == expected_early
        # Every other page was somebody's meanwhile, and nobody had one of the quarantined.
        assert difference(before, counters(tight.decode), "evicted_pages") > 0
        assert load(tight.decode)["quarantined_pages"] == QUARANTINED
        running = pool.submit(together, tight.decode, late)
        wait_until(lambda: load(tight.decode)["running"] > 2, 10, "others run")
        pid = tight.pid("prefill-0")
        if ending == "wakes":
            go_on(pid)
            assert sending.result().status_code == 409
        else:
            os.kill(pid, signal.SIGKILL)
            assert isinstance(sending.exception(), Exception)
        wait_until(lambda: load(tight.decode)["quarantined_pages"] == 0, 2, "the pages came back")
        assert running.result() == expected_late
    # What is cached by now was not written to either.
    assert together(tight.decode, late + early) == expected_late + expected_early
    assert hand_off.generate(max_tokens=4).status_code == 409
    wait_served(tight)
    wait_idle(tight.engines)
    assert load(tight.decode)["total_pages"] == TIGHT_PAGES
