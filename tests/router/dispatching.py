"""Requests through a dispatcher over engines that fail, and what their clients must get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from microserving.program import Cluster, GenerationChunk, Program, Request
from microserving.program.testing import collect

from .faults import IDS, OUTPUT, TEXT, FaultyCluster, Script
from .hosting import Hosted, generation


def text(chunks: list[GenerationChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def ids(chunks: list[GenerationChunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def assert_whole(chunks: list[GenerationChunk]) -> None:
    """What an engine that never failed would have given."""
    assert (text(chunks), ids(chunks)) == (TEXT, IDS)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert (chunks[-1].prompt_tokens, chunks[-1].completion_tokens) == (20, len(OUTPUT))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """And hold that no task is left."""

    async def all_of_it() -> None:
        async with asyncio.timeout(20):
            await scenario()
        for _ in range(3):  # generators that a program left are closed by the loop
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(all_of_it())


async def served(program: str, script: Script, **settings: object) -> tuple[list[GenerationChunk], Hosted]:
    hosted = Hosted(program, FaultyCluster(script), **settings)
    chunks = await collect(hosted.dispatcher.generate(generation()))
    await hosted.settle()
    return chunks, hosted


class Custom(Program):
    """``route`` is the function that the test gives."""

    def __init__(self, behaviour: Callable[[Request, Cluster], AsyncIterator[Any]]) -> None:
        super().__init__()
        self._behaviour = behaviour

    async def route(self, request: Request, cluster: Cluster) -> AsyncIterator[GenerationChunk]:
        async for chunk in self._behaviour(request, cluster):
            yield chunk
