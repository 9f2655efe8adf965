"""The program in charge: its plan, and who uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from microserving.program import Cluster, EngineClient, GenerationChunk, Program, Request
from microserving.program.testing import collect

from .hosting import Hosted, generation

LAST = GenerationChunk(text="!", finish_reason="stop")


async def never_returns(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


class Planner(Program):
    """Its plan looks once at the cluster, then does what the test says."""

    def __init__(self, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._then = then
        self.seen: list[EngineClient] = []

    async def route(self, request: Request, cluster: Cluster) -> AsyncIterator[GenerationChunk]:
        yield LAST

    async def plan(self, cluster: Cluster) -> None:
        self.seen = list(cluster.all)
        await self._then()


async def fails() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("then", [never_returns, fails])
def test_a_plan_runs_and_ends(then: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        program = Planner(then)
        hosted = Hosted(program)
        hosted.host.start()
        assert await collect(hosted.dispatcher.generate(generation())) == [LAST]
        await asyncio.sleep(0)
        assert [engine.id for engine in program.seen] == ["prefill-0", "decode-0"]
        await hosted.settle()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())
    assert any("plan failed" in message for message in caplog.messages) == (then is fails)
