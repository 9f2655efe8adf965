"""The doors: one engine alone, and the same engines behind a router with each of three programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from ..conftest import Cluster
from ..processes import wait_idle
from .door import Door

PROGRAMS = ("round_robin", "prefill_decode", "balanced_prefill_decode")


@pytest.fixture(scope="session")
def engine(hybrid: str) -> Iterator[Door]:
    """What the others are compared with."""
    with closing(Door("engine", hybrid)) as door:
        yield door


@pytest.fixture(scope="session", params=["engine", *PROGRAMS])
def door(
    request: pytest.FixtureRequest, engine: Door, router_for: Callable[[str], str], cluster: Cluster
) -> Iterator[Door]:
    """Each door in turn; nothing is held behind it in the end."""
    if request.param == "engine":
        yield engine
        wait_idle([engine.url])
        return
    with closing(Door(request.param, router_for(request.param))) as door:
        yield door
    wait_idle(cluster.engines)
