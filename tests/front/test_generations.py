"""The chunks of several generations as one sequence, which ends whatever becomes of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from microserving.errors import InternalError, MicroservingError, NoEngine
from microserving.front.generations import run_generations
from microserving.protocol.generation import GenerationChunk, GenerationRequest, SamplingParams, StopParams

from .fakes import Script, ScriptedBackend, pieces

REQUESTS = [GenerationRequest(name, (1,), SamplingParams(), StopParams()) for name in "abcde"]


class Odd(BaseException):
    """Not an Exception."""


async def read(script: Script, concurrency: int) -> list[int]:
    """The indices of the chunks, in the order in which they came."""
    backend = ScriptedBackend(script)
    async with asyncio.timeout(10), run_generations(backend, REQUESTS, concurrency) as chunks:
        indices = [index async for index, _ in chunks]
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert backend.active == 0
    return indices


@pytest.mark.parametrize("concurrency", [1, 2, 5, 9])
def test_every_chunk_comes_once(concurrency: int) -> None:
    indices = asyncio.run(read(pieces(["a", "b", "c"]), concurrency))
    assert sorted(indices) == sorted([*range(5)] * 3)


@pytest.mark.parametrize("concurrency", [1, 2, 5])
@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (NoEngine("gone"), NoEngine),
        (ValueError(), ValueError),
        (Odd(), Odd),
        (BaseExceptionGroup("several", [Odd()]), BaseExceptionGroup),
        (asyncio.CancelledError(), InternalError),
    ],
)
def test_the_reader_is_told_whatever_ends_one_of_them(
    error: BaseException, seen: type[BaseException], concurrency: int
) -> None:
    async def fails(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        yield GenerationChunk("a", (1,))
        if request.request_id == "b":
            raise error
        yield GenerationChunk("b", (2,), "stop")

    with pytest.raises(seen):
        asyncio.run(read(fails, concurrency))


def test_an_error_does_not_wait_for_those_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microserving.front.generations._END_S", 0.01)

    async def scenario() -> None:
        until = asyncio.Event()

        async def clings(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
            if request.request_id == "b":
                raise NoEngine("gone")
            while not until.is_set():
                try:
                    await until.wait()
                except asyncio.CancelledError:
                    continue
            yield GenerationChunk("b", (2,), "stop")

        with pytest.raises(MicroservingError, match="gone"):
            async with run_generations(ScriptedBackend(clings), REQUESTS[:2], 2) as chunks:
                await anext(chunks)
        until.set()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(scenario())
