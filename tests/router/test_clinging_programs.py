"""Programs that swallow their cancellation keep nothing but their own task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from microserving.front.serving import run_on_uvloop
from microserving.program import Cluster, GenerationChunk, Program, Request
from microserving.program.testing import collect

from .dispatching import Custom
from .hosting import Hosted, generation


async def cling(until: asyncio.Event) -> None:
    while not until.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await until.wait()


def run(scenario: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """until: the program clings until it is set, which is when all was seen."""

    async def main() -> None:
        until = asyncio.Event()
        async with asyncio.timeout(20):
            await scenario(until)
        until.set()
        await asyncio.sleep(0)

    run_on_uvloop(main())


def test_one_that_clings_while_it_is_closed_is_left(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(until: asyncio.Event) -> None:
        class Clings(Program):
            async def route(self, request: Request, cluster: Cluster) -> AsyncIterator[GenerationChunk]:
                await cluster.decode.round_robin().prep_recv(request, end=3)
                try:
                    yield GenerationChunk(text="a", token_ids=(1,))
                finally:
                    await cling(until)

        hosted = Hosted(Clings())
        async with aclosing(hosted.dispatcher.generate(generation())) as chunks:
            await anext(chunks)
        await hosted.settle()

    run(scenario)
    assert any("although it was cancelled" in message for message in caplog.messages)


def test_one_that_clings_in_its_route_loses_its_engines(caplog: pytest.LogCaptureFixture) -> None:
    """Its task cannot be ended by anybody; that it holds engines can."""

    async def scenario(until: asyncio.Event) -> None:
        freed = asyncio.Event()

        async def clings(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
            await cluster.decode.round_robin().prep_recv(request, end=3)
            await cling(until)
            yield GenerationChunk(text="late", finish_reason="stop")

        hosted = Hosted(Custom(clings))
        engine = hosted.cluster["decode-0"]
        abort = engine.abort

        async def told(request: Request) -> None:
            await abort(request)
            freed.set()

        engine.abort = told  # type: ignore[method-assign]
        request = replace(generation(), timeout_s=0.02)
        task = asyncio.create_task(collect(hosted.dispatcher.generate(request)))
        await freed.wait()
        await hosted.in_flight.until_idle(engine)
        assert not engine.held
        assert not task.done()
        until.set()
        await asyncio.wait([task])
        assert type(task.exception()).__name__ == "DeadlineExceeded"
        await hosted.settle()

    run(scenario)
    assert any("its engines are freed" in message for message in caplog.messages)
