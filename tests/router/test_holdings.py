"""What counts as in flight, from the choice of an engine to the end of the request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from microserving.errors import EngineUnavailable, InternalError
from microserving.program import Cluster, EngineClient, GenerationChunk, Received, Request
from microserving.program.testing import FakeCluster, FakeEngine, collect, make_request
from microserving.protocol.microserving import EngineInfo
from microserving.router.engine_client import EngineTimeouts
from microserving.router.engine_registry import EngineRegistry
from microserving.router.holdings import Holdings
from microserving.router.in_flight import InFlight

from .dispatching import Custom
from .dispatching import run as run_alone
from .engine_server import INFO
from .hosting import Hosted, generation

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


async def reserves(engine: EngineClient, request: Request) -> None:
    await engine.prep_recv(request, end=3)


async def generates(engine: EngineClient, request: Request) -> None:
    await anext(engine.start_generate(request))


async def sends(engine: EngineClient, request: Request) -> None:
    await engine.remote_send(request, to=Received("decode-0/r", 0, 3, engine))


async def commits(engine: EngineClient, request: Request) -> None:
    await engine.commit(request)


Verb = Callable[[EngineClient, Request], Awaitable[None]]


@pytest.mark.parametrize("verb", [reserves, generates, sends, commits])
def test_after_the_end_a_task_of_the_program_gets_nothing(verb: Verb) -> None:
    tasks: list[asyncio.Task[None]] = []

    async def scenario() -> None:
        ended = asyncio.Event()

        async def later(request: Request, cluster: Cluster) -> None:
            await ended.wait()
            await verb(cluster.decode.round_robin(), request)

        async def route(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
            tasks.append(asyncio.create_task(later(request, cluster)))
            yield GenerationChunk(text="!", finish_reason="stop")

        hosted = Hosted(Custom(route))
        await collect(hosted.dispatcher.generate(generation()))
        ended.set()
        with pytest.raises(InternalError, match="the request has ended"):
            await tasks[0]
        assert len(hosted.dispatcher._alarms) == 0
        assert not hosted.cluster.calls
        await hosted.settle()

    run_alone(scenario)


@pytest.mark.parametrize("lost", [False, True], ids=["given", "answer lost"])
def test_what_an_engine_gives_after_the_end_is_taken_back(lost: bool) -> None:
    """It was asked before; the abort for it was overtaken by the answer."""

    async def scenario() -> None:
        answering = asyncio.Event()
        tasks: list[asyncio.Task[None]] = []

        async def route(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
            tasks.append(asyncio.create_task(reserves(cluster.decode.round_robin(), request)))
            await asyncio.sleep(0)
            yield GenerationChunk(text="!", finish_reason="stop")

        hosted = Hosted(Custom(route))
        engine = hosted.cluster["decode-0"]
        reserve = engine.prep_recv

        async def slow(request: Request, *, end: int) -> Received:
            await answering.wait()
            received = await reserve(request, end=end)
            if lost:
                raise EngineUnavailable("gone")
            return received

        engine.prep_recv = slow  # type: ignore[method-assign]
        await collect(hosted.dispatcher.generate(generation()))
        await hosted.dispatcher.stop()
        assert not hosted.in_flight
        answering.set()
        with pytest.raises(EngineUnavailable if lost else InternalError):
            await tasks[0]
        assert len(hosted.dispatcher._alarms) == 0
        await hosted.settle()

    run_alone(scenario)


def test_an_engine_that_refuses_at_once_to_generate_has_failed() -> None:
    async def scenario() -> None:
        fake, in_flight = FakeCluster(), InFlight()
        holdings = Holdings(in_flight)
        engine = fake["decode-0"]

        def refuses(request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
            raise EngineUnavailable("gone")

        engine.start_generate = refuses  # type: ignore[method-assign]
        with pytest.raises(EngineUnavailable):
            await anext(holdings.bind(engine).start_generate(REQUEST))
        assert holdings.failed == {engine}
        assert not holdings

    asyncio.run(scenario())
