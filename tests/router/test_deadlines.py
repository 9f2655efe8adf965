"""A request ends at its deadline, a program that does nothing in time, and a client that leaves is neither."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from microserving.errors import DeadlineExceeded, InternalError
from microserving.program import Cluster, GenerationChunk, Request
from microserving.program.testing import collect
from microserving.router.admission import Admission, AdmissionSettings

from .dispatching import Custom, assert_whole, run
from .faults import FaultyCluster
from .hosting import QUICK, Hosted, generation


@pytest.mark.parametrize("silent_at", ["prep_recv", "remote_send", "start_generate"])
@pytest.mark.case("STR-11")
def test_a_deadline_ends_a_request_wherever_it_is(silent_at: str) -> None:
    async def scenario() -> None:
        hosted = Hosted("prefill_decode", FaultyCluster())

        async def never(*_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

        async def never_yields(*_: Any, **__: Any) -> AsyncIterator[GenerationChunk]:
            await asyncio.Event().wait()
            yield GenerationChunk("")

        silent = never_yields if silent_at == "start_generate" else never
        for engine in hosted.cluster.engines.values():
            setattr(engine, silent_at, silent)
        with pytest.raises(DeadlineExceeded):
            await collect(hosted.dispatcher.generate(replace(generation(), timeout_s=0.05)))
        await hosted.settle()
        (record,) = hosted.dispatcher.ledger.records
        assert (record.outcome, record.state, len(record.attempts)) == ("deadline_exceeded", "complete", 1)

    run(scenario)


def test_a_deadline_after_the_first_token_and_the_default_one() -> None:
    async def slow(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
        assert request.timeout_s is not None
        assert request.deadline is not None
        yield GenerationChunk("Once", (1,))
        await asyncio.Event().wait()

    async def scenario() -> None:
        hosted = Hosted(Custom(slow), FaultyCluster(), replace(QUICK, request_timeout_s=0.05))
        chunks = hosted.dispatcher.generate(generation())
        assert (await anext(chunks)).text == "Once"
        with pytest.raises(DeadlineExceeded):
            await anext(chunks)
        await hosted.settle()

    run(scenario)


def test_a_deadline_does_not_cut_into_what_the_client_reads() -> None:
    """It is slow itself; the next chunk that it asks for is refused."""

    async def scenario() -> None:
        hosted = Hosted("round_robin", FaultyCluster())
        async with aclosing(hosted.dispatcher.generate(replace(generation(), timeout_s=0.03))) as chunks:
            await anext(chunks)
            await asyncio.sleep(0.06)
            with pytest.raises(DeadlineExceeded):
                await anext(chunks)
        await hosted.settle()

    run(scenario)


async def hangs(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await cluster.decode.round_robin().prep_recv(request, end=3)
    await asyncio.Event().wait()
    yield


async def clings(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    with pytest.raises(asyncio.CancelledError):
        await asyncio.Event().wait()
    yield GenerationChunk("late", (1,))


@pytest.mark.parametrize("behaviour", [hangs, clings])
def test_a_program_that_hangs_is_ended(behaviour: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        hosted = Hosted(Custom(behaviour), FaultyCluster(), replace(QUICK, stall_timeout_s=0.03))
        with pytest.raises(InternalError, match="hung"):
            await collect(hosted.dispatcher.generate(generation()))
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await hosted.settle()

    run(scenario)
    assert any("hung" in record.getMessage() and record.levelno == logging.ERROR for record in caplog.records)


def test_waiting_for_an_engine_is_not_hanging() -> None:
    async def scenario() -> None:
        hosted = Hosted("prefill_decode", FaultyCluster(), replace(QUICK, stall_timeout_s=0.02))
        engine = hosted.cluster["decode-0"]
        reserve = engine.prep_recv

        async def slow(request: Request, *, end: int) -> Any:
            await asyncio.sleep(0.08)
            return await reserve(request, end=end)

        engine.prep_recv = slow  # type: ignore[method-assign]
        assert_whole(await collect(hosted.dispatcher.generate(generation())))
        await hosted.settle()

    run(scenario)


def test_a_client_that_leaves_is_no_deadline() -> None:
    async def scenario() -> None:
        hosted = Hosted(Custom(hangs), FaultyCluster())
        task = asyncio.ensure_future(
            collect(hosted.dispatcher.generate(replace(generation(), timeout_s=30.0)))
        )
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await hosted.settle()
        (record,) = hosted.dispatcher.ledger.records
        assert record.outcome == "cancelled"

    run(scenario)


@pytest.mark.parametrize("own", [True, False], ids=["its own", "the default"])
@pytest.mark.case("STR-11")
def test_the_time_in_the_queue_counts(own: bool) -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionSettings(max_in_flight=1, queue_timeout_s=30), list)
        settings = QUICK if own else replace(QUICK, request_timeout_s=0.05)
        hosted = Hosted("round_robin", FaultyCluster(), settings, admission=admission)
        assert admission.try_enter()
        request = replace(generation(), timeout_s=0.05) if own else generation()
        with pytest.raises(DeadlineExceeded):
            await collect(hosted.dispatcher.generate(request))
        assert (admission.waiting, admission.admitted) == (0, 1)
        assert not hosted.cluster.calls
        admission.leave()
        await hosted.settle()

    run(scenario)


def test_what_is_let_in_late_has_the_rest_of_its_time() -> None:
    seen: list[float] = []

    async def looks(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
        assert request.deadline is not None
        seen.append(request.deadline)
        yield GenerationChunk("!", (1,), "stop")

    async def scenario() -> None:
        admission = Admission(AdmissionSettings(max_in_flight=1), list)
        hosted = Hosted(Custom(looks), FaultyCluster(), admission=admission)
        assert admission.try_enter()
        loop = asyncio.get_running_loop()
        came = loop.time()
        task = asyncio.create_task(collect(hosted.dispatcher.generate(replace(generation(), timeout_s=10.0))))
        await asyncio.sleep(0.05)
        before = loop.time()
        admission.leave()
        await task
        assert came + 10.0 <= seen[0] < before + 10.0
        await hosted.settle()

    run(scenario)


def test_looking_for_engines_ends_at_the_deadline() -> None:
    async def scenario() -> None:
        hosted = Hosted("round_robin")
        for engine in hosted.cluster.engines.values():
            engine.up = False

        async def for_ever() -> None:
            await asyncio.Event().wait()

        hosted.served.refresh = for_ever  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceeded):
            await collect(hosted.dispatcher.generate(replace(generation(), timeout_s=0.05)))
        await hosted.settle()

    run(scenario)
