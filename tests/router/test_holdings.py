"""What counts as in flight, from the choice of an engine to the end of the request."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from microserving.errors import EngineUnavailable
from microserving.program import Cluster, EngineClient
from microserving.program.testing import FakeCluster, FakeEngine, make_request
from microserving.protocol.microserving import EngineInfo
from microserving.router.engine_client import EngineTimeouts
from microserving.router.engine_registry import EngineRegistry
from microserving.router.holdings import Holdings
from microserving.router.in_flight import InFlight

from .engine_server import INFO

REQUEST = make_request(range(8))


def view(cluster: Cluster, holdings: Holdings) -> Cluster:
    return cluster.bound(seen=holdings.bind, chosen=holdings.choose)


def test_a_burst_of_choices_is_spread() -> None:
    """Requests that choose before any of them has asked its engine see each other all the same."""
    registry = EngineRegistry(["http://a", "http://b"], [], EngineTimeouts())
    for peer, engine_id in zip(registry.peers, ("prefill-0", "prefill-1"), strict=True):
        assert registry.admit(peer, EngineInfo(**INFO | {"engine_id": engine_id}))
    busy = registry.peers[0].client
    registry.in_flight[busy] += 3
    attempts = [Holdings(registry.in_flight) for _ in range(9)]
    chosen = [view(registry.cluster, attempt).prefill.least_loaded().id for attempt in attempts]
    assert Counter(chosen) == {"prefill-0": 3, "prefill-1": 6}
    for attempt in attempts:
        attempt.unclaim()
        attempt.unclaim()
    assert registry.in_flight == {busy: 3}


def test_a_choice_and_its_use_count_once() -> None:
    async def scenario() -> None:
        fake, in_flight = FakeCluster(), InFlight()
        holdings = Holdings(in_flight)
        cluster = view(fake, holdings)
        prefill, decode = fake["prefill-0"], fake["decode-0"]

        def counts() -> tuple[int, int]:
            return in_flight[prefill], in_flight[decode]

        sender, receiver = cluster.prefill.round_robin(), cluster.decode.round_robin()
        cluster.decode.round_robin()  # chosen twice, one request
        assert counts() == (1, 1)
        received = await receiver.prep_recv(REQUEST, end=4)
        assert counts() == (1, 1)
        assert received.engine is receiver
        assert cluster.decode.round_robin() is receiver  # chosen again while it holds something
        assert counts() == (1, 1)
        await sender.remote_send(REQUEST, to=received)
        assert counts() == (0, 1)
        async for chunk in receiver.start_generate(REQUEST, begin=4):
            assert counts() == (0, 1), chunk
        assert counts() == (0, 0)
        assert not holdings
        assert not in_flight

    asyncio.run(scenario())


@pytest.mark.parametrize("verb", ["prep_recv", "remote_send"])
def test_an_engine_that_failed_counts_until_it_was_told(verb: str) -> None:
    """It may have reserved, and only the answer got lost."""

    async def scenario() -> None:
        fake, in_flight = FakeCluster(), InFlight()
        holdings = Holdings(in_flight)
        engines: dict[str, FakeEngine] = {"prep_recv": fake["decode-0"], "remote_send": fake["prefill-0"]}
        failing = engines[verb]
        failing.failures[verb] = EngineUnavailable("gone")
        cluster = view(fake, holdings)

        async def use(sender: EngineClient, receiver: EngineClient) -> None:
            await sender.remote_send(REQUEST, to=await receiver.prep_recv(REQUEST, end=4))

        with pytest.raises(EngineUnavailable):
            await use(cluster.prefill.round_robin(), cluster.decode.round_robin())
        assert in_flight[failing] == 1
        await holdings.release(1.0)
        holdings.unclaim()
        assert not in_flight
        assert failing.calls[-1].verb == "abort"

    asyncio.run(scenario())
