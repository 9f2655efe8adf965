"""A request without a first token in time is tried beside on another engine; the faster one wins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from microserving.errors import EngineUnavailable, KVExhausted, MicroservingError
from microserving.program import EngineClient, GenerationChunk, Request
from microserving.program.testing import FakeEngine, collect

from .dispatching import assert_whole, run
from .faults import FaultyCluster
from .hosting import QUICK, Hosted, generation


class Stuck:
    """Makes an engine wait before its first chunk until it is told."""

    def __init__(self, engine: FakeEngine) -> None:
        self.go = asyncio.Event()
        self.closed = False
        self._generate = engine.start_generate
        engine.start_generate = self  # type: ignore[method-assign, assignment]

    async def __call__(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        try:
            await self.go.wait()
            async for chunk in self._generate(request, begin=begin):
                yield chunk
        finally:
            self.closed = True


HEDGED = replace(QUICK, hedge_after_s=0.02)


@pytest.mark.parametrize("program", ["round_robin", "prefill_decode"])
def test_a_slow_first_token_is_hedged(program: str) -> None:
    async def scenario() -> None:
        cluster = FaultyCluster()
        stuck = Stuck(cluster["decode-0" if program == "prefill_decode" else "prefill-0"])
        hosted = Hosted(program, cluster, HEDGED)
        assert_whole(await collect(hosted.dispatcher.generate(generation())))
        await hosted.settle()
        assert stuck.closed
        (record,) = hosted.dispatcher.ledger.records
        assert (record.hedges, record.retries, record.resumes) == (1, 0, 0)

    run(scenario)


def test_who_is_fast_is_not_hedged_and_who_is_first_wins() -> None:
    async def scenario() -> None:
        hosted = Hosted("round_robin", FaultyCluster(), HEDGED)
        assert_whole(await collect(hosted.dispatcher.generate(generation())))
        assert len(hosted.cluster.calls) == 1
        await hosted.settle()

        hosted = Hosted("round_robin", FaultyCluster(), HEDGED)
        first, other = Stuck(hosted.cluster["prefill-0"]), Stuck(hosted.cluster["decode-0"])
        asyncio.get_running_loop().call_later(0.05, first.go.set)
        assert_whole(await collect(hosted.dispatcher.generate(generation())))
        await hosted.settle()
        assert other.closed

    run(scenario)


def test_a_hedge_that_fails_leaves_the_first_attempt_alone() -> None:
    async def scenario() -> None:
        hosted = Hosted("round_robin", FaultyCluster(), HEDGED)
        first = Stuck(hosted.cluster["prefill-0"])
        for name in ("prefill-1", "decode-0", "decode-1"):
            hosted.cluster[name].failures["start_generate"] = EngineUnavailable("gone")
        asyncio.get_running_loop().call_later(0.05, first.go.set)
        assert_whole(await collect(hosted.dispatcher.generate(generation())))
        await hosted.settle()

    run(scenario)


GONE, FULL = EngineUnavailable("gone"), KVExhausted("full")


class Pair:
    """The engines that are asked first and second fail with ``errors``, in the order that ``slow`` (0 or 1, which of them
    takes longer) says. asked: all engines that were."""

    def __init__(
        self, hosted: Hosted, errors: tuple[MicroservingError, MicroservingError], slow: int
    ) -> None:
        self.asked: list[EngineClient] = []
        self._errors = errors
        self._go = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.call_later(0.06, self._go[1 - slow].set)
        loop.call_later(0.08, self._go[slow].set)
        for engine in hosted.cluster.engines.values():
            engine.start_generate = partial(self._play, engine, engine.start_generate)  # type: ignore[method-assign]

    async def _play(
        self, engine: FakeEngine, generate: Any, request: Request, *, begin: int = 0
    ) -> AsyncIterator[GenerationChunk]:
        number = len(self.asked)
        self.asked.append(engine)
        if number < 2:
            await self._go[number].wait()
            raise self._errors[number]
        async for chunk in generate(request, begin=begin):
            yield chunk


@pytest.mark.parametrize("errors", [(GONE, GONE), (FULL, FULL), (GONE, FULL), (FULL, GONE)])
@pytest.mark.parametrize("slow", [0, 1])
def test_engines_that_failed_either_attempt_are_left_out_of_the_next_one(
    errors: tuple[MicroservingError, MicroservingError], slow: int
) -> None:
    async def scenario() -> None:
        told: list[EngineClient] = []
        hosted = Hosted("round_robin", FaultyCluster(prefill=0, decode=3), HEDGED)
        hosted.dispatcher._on_failure = told.append
        pair = Pair(hosted, errors, slow)
        assert_whole(await collect(hosted.dispatcher.generate(generation())))
        assert len(set(pair.asked)) == len(pair.asked) == 3
        gone = {engine for engine, error in zip(pair.asked[:2], errors, strict=True) if error is GONE}
        assert set(told) == gone
        (record,) = hosted.dispatcher.ledger.records
        assert [attempt.error for attempt in record.attempts] == [*(error.code for error in errors), None]
        await hosted.settle()

    run(scenario)


@pytest.mark.parametrize("steps", range(0, 40, 3))
def test_a_hedged_request_that_is_cancelled_leaves_nothing(steps: int) -> None:
    async def scenario() -> None:
        hosted = Hosted("prefill_decode", FaultyCluster(), replace(HEDGED, hedge_after_s=1e-4))
        for name in ("decode-0", "decode-1"):
            Stuck(hosted.cluster[name])
        task = asyncio.ensure_future(collect(hosted.dispatcher.generate(generation())))
        for _ in range(steps):
            await asyncio.sleep(1e-4)
        task.cancel()
        await asyncio.wait([task])
        await hosted.settle()

    run(scenario)
