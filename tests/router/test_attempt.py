"""Programs that misbehave hurt their own request only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from microserving.errors import EngineUnavailable, InternalError, Preempted, ProgramError
from microserving.program import Cluster, GenerationChunk, Program, Request
from microserving.program.testing import collect

from .dispatching import Custom
from .hosting import Hosted, generation

LAST = GenerationChunk(text="!", finish_reason="stop")


async def reserve(request: Request, cluster: Cluster) -> None:
    await cluster.decode.round_robin().prep_recv(request, end=3)


async def raises_a_bug(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await reserve(request, cluster)
    yield {}["missing"]


async def raises_a_startup_error(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await reserve(request, cluster)
    raise ProgramError("not here")
    yield


async def ends_the_process(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await reserve(request, cluster)
    raise SystemExit(3)
    yield


class Odd(BaseException):
    """Neither an Exception nor one that Python itself treats in a special way."""


async def raises_something_odd(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await reserve(request, cluster)
    raise Odd
    yield


async def raises_after_a_chunk(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await reserve(request, cluster)
    yield GenerationChunk(text="a")
    raise BaseExceptionGroup("both", [Odd(), ValueError()])


async def leaves_like_a_generator(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await reserve(request, cluster)
    raise GeneratorExit
    yield


async def yields_rubbish(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await reserve(request, cluster)
    yield "text"


async def yields_nothing(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await reserve(request, cluster)
    return
    yield


async def stops_early(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    async for chunk in cluster.decode.round_robin().start_generate(request):
        yield chunk
        break


async def goes_on(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await reserve(request, cluster)
    yield LAST
    yield LAST


async def cancels_itself(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    await reserve(request, cluster)
    task = asyncio.ensure_future(asyncio.sleep(10))
    task.cancel()
    await task
    yield LAST


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (raises_a_bug, "the router program failed"),
        (raises_a_startup_error, "the router program failed"),
        (ends_the_process, "the router program failed"),
        (raises_something_odd, "the router program failed"),
        (raises_after_a_chunk, "the router program failed"),
        (leaves_like_a_generator, "the router program failed"),
        (yields_rubbish, "yielded a str instead of a GenerationChunk"),
        (yields_nothing, "ended without a last chunk"),
        (stops_early, "ended without a last chunk"),
        (goes_on, "went on after the last chunk"),
        (cancels_itself, "was cancelled from within"),
    ],
)
def test_a_bug_fails_its_own_request(behaviour: Any, message: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        hosted = Hosted(Custom(behaviour))
        with pytest.raises(InternalError, match=message) as caught:
            await collect(hosted.dispatcher.generate(generation()))
        assert __file__ not in caught.value.message
        await hosted.settle()
        (record,) = hosted.dispatcher.ledger.records
        assert record.outcome == "internal_error"

    asyncio.run(scenario())
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "hosting.py:1" in record.getMessage()


def test_a_bug_is_logged_with_its_line(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from microserving.program import Program\n"
        "class Mine(Program):\n"
        "    async def route(self, request, cluster):\n"
        "        yield self.helper()\n"
        "    def helper(self):\n"
        "        return {}['missing']\n"
    )

    async def scenario() -> None:
        hosted = Hosted(str(path))
        with pytest.raises(InternalError):
            await collect(hosted.dispatcher.generate(generation()))

    asyncio.run(scenario())
    assert f"the router program failed at {path}:6: KeyError('missing')" in caplog.messages


@pytest.mark.case("PD-34")
def test_preempt_never_passes() -> None:
    async def gives_back(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
        yield GenerationChunk(text="", finish_reason="preempt")

    async def scenario() -> None:
        hosted = Hosted(Custom(gives_back))
        with pytest.raises(Preempted):
            await collect(hosted.dispatcher.generate(generation()))

    asyncio.run(scenario())


async def leaves_streams_open(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    """Two generations at once, neither read to its end."""
    one, other = list(cluster.all)
    streams = [one.start_generate(request), other.start_generate(request)]
    for stream in streams:
        yield await anext(stream)
    yield LAST


async def generates_elsewhere(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    """Reserves on one engine and uses another one."""
    await reserve(request, cluster)
    async for chunk in cluster.prefill.round_robin().start_generate(request):
        yield chunk


@pytest.mark.parametrize("behaviour", [leaves_streams_open, generates_elsewhere])
def test_what_a_program_forgets_is_freed(behaviour: Any) -> None:
    async def scenario() -> None:
        hosted = Hosted(Custom(behaviour))
        assert (await collect(hosted.dispatcher.generate(generation())))[-1].finish_reason == "stop"
        await hosted.settle()

    asyncio.run(scenario())


def test_streams_that_a_program_leaves_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not some time later by the garbage collector: the connection behind it is what an engine sees."""
    closed: list[str] = []

    async def endless(request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        try:
            while True:
                yield GenerationChunk(text="a")
        finally:
            closed.append(request.request_id)

    kept: list[AsyncIterator[GenerationChunk]] = []

    async def keeps(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
        kept.append(cluster.decode.round_robin().start_generate(request))
        yield await anext(kept[0])
        yield LAST

    async def scenario() -> None:
        hosted = Hosted(Custom(keeps))
        monkeypatch.setattr(hosted.cluster["decode-0"], "start_generate", endless)
        assert (await collect(hosted.dispatcher.generate(generation())))[-1] == LAST
        await hosted.settle()
        assert closed == ["r"]

    asyncio.run(scenario())


def test_in_flight_counts_from_reservation_to_end() -> None:
    seen: list[int] = []

    async def watches(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
        (engine,) = cluster.decode
        seen.append(hosted.in_flight.total())
        received = await engine.prep_recv(request, end=3)
        seen.append(hosted.in_flight.total())
        await cluster.prefill.round_robin().remote_send(request, to=received)
        seen.append(hosted.in_flight.total())
        async for chunk in engine.start_generate(request, begin=3):
            seen.append(hosted.in_flight.total())
            yield chunk
        seen.append(hosted.in_flight.total())

    async def scenario() -> None:
        await collect(hosted.dispatcher.generate(generation()))
        await hosted.settle()

    hosted = Hosted(Custom(watches))
    asyncio.run(scenario())
    assert seen == [0, 1, 1, 1, 1, 0]


def test_an_abort_by_the_program_is_not_repeated() -> None:
    async def aborts(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
        engine = cluster.decode.round_robin()
        await engine.prep_recv(request, end=3)
        await engine.abort(request)
        yield LAST

    async def scenario() -> None:
        hosted = Hosted(Custom(aborts))
        await collect(hosted.dispatcher.generate(generation()))
        await hosted.settle()
        assert hosted.cluster.calls == [("decode-0", "prep_recv"), ("decode-0", "abort")]

    asyncio.run(scenario())


def test_an_engine_that_refused_is_not_asked_to_abort() -> None:
    """The id might be somebody else's there."""

    async def scenario() -> None:
        hosted = Hosted("prefill_decode")
        hosted.cluster["decode-0"]._running.add("r")
        with pytest.raises(InternalError, match="asked an engine wrongly"):
            await collect(hosted.dispatcher.generate(generation()))
        await hosted.stop()
        assert ("decode-0", "abort") not in hosted.cluster.calls
        assert not hosted.in_flight

    asyncio.run(scenario())


async def never_returns(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


async def is_gone(*_: Any, **__: Any) -> None:
    raise EngineUnavailable("gone")


@pytest.mark.parametrize(("abort", "why"), [(never_returns, "no answer within"), (is_gone, "gone")])
def test_clean_up_is_bounded(
    abort: Callable[..., Awaitable[None]],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine that does not answer keeps neither a task nor the counters."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        hosted = Hosted("prefill_decode")
        hosted.cluster["prefill-0"].failures["remote_send"] = EngineUnavailable("gone")
        monkeypatch.setattr(hosted.cluster["decode-0"], "abort", abort)
        with pytest.raises(EngineUnavailable):
            await collect(hosted.dispatcher.generate(generation()))
        async with asyncio.timeout(2):
            await hosted.stop()
        assert not hosted.in_flight
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())
    assert any(f"could not abort request r on decode-0: {why}" in message for message in caplog.messages)


def test_a_program_that_will_not_close_is_left(caplog: pytest.LogCaptureFixture) -> None:
    async def clings(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
        await reserve(request, cluster)
        try:
            yield GenerationChunk(text="a")
        finally:
            await asyncio.Event().wait()

    async def scenario() -> None:
        hosted = Hosted(Custom(clings))
        async with aclosing(hosted.dispatcher.generate(generation())) as chunks:  # type: ignore[type-var]
            await anext(chunks)
        async with asyncio.timeout(2):
            await hosted.settle()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [ValueError, Odd, SystemExit])
def test_a_clean_up_may_raise_anything(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    class FailsToClose(Program):
        async def route(self, request: Request, cluster: Cluster) -> AsyncIterator[GenerationChunk]:
            await reserve(request, cluster)
            try:
                yield GenerationChunk(text="a")
            finally:
                raise error

    async def scenario() -> None:
        hosted = Hosted(FailsToClose())
        async with aclosing(hosted.dispatcher.generate(generation())) as chunks:  # type: ignore[type-var]
            await anext(chunks)
        await hosted.settle()

    asyncio.run(scenario())
    assert any("a stream did not close" in message for message in caplog.messages)


def test_a_route_that_raises_when_it_is_called_leaves_no_alarm() -> None:
    class Raises(Program):
        def route(self, request: Request, cluster: Cluster) -> AsyncIterator[GenerationChunk]:
            raise ValueError("no generator")

    async def scenario() -> None:
        hosted = Hosted(Raises())
        with pytest.raises(InternalError):
            await collect(hosted.dispatcher.generate(generation()))
        assert len(hosted.dispatcher._alarms) == 0
        await hosted.settle()

    asyncio.run(scenario())


def test_requests_are_refused_when_told() -> None:
    async def scenario() -> None:
        hosted = Hosted("round_robin")
        running = hosted.dispatcher.generate(generation())
        await anext(running)
        hosted.dispatcher.refuse_requests()
        assert not hosted.dispatcher.ready
        with pytest.raises(Exception, match="the server is shutting down"):
            await collect(hosted.dispatcher.generate(generation(request_id="new")))
        assert (await collect(running))[-1].finish_reason == "stop"
        await hosted.settle()

    asyncio.run(scenario())
