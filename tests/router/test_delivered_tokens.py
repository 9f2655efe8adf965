"""What a client got is counted, whatever became of its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from microserving.errors import EngineUnavailable
from microserving.program import Cluster, GenerationChunk, Program, Request
from microserving.router.dispatch import DispatchSettings
from microserving.router.retries import RetrySettings

from .hosting import Hosted, generation


class FailsAgain(Program):
    """Each attempt gives so many tokens, then its engine is gone."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self._tokens = tokens

    async def route(self, request: Request, cluster: Cluster) -> AsyncIterator[GenerationChunk]:
        first = len(request.resume_output_ids) + 1
        for token in range(first, first + (self._tokens.pop(0) if self._tokens else 0)):
            yield GenerationChunk("x", token_ids=(token,))
        raise EngineUnavailable("gone")


@pytest.mark.case("MT-05")
def test_tokens_of_every_attempt_are_counted() -> None:
    """2 tokens and a failure, 3 more and a failure, then nothing any more: 5 were delivered."""

    async def scenario() -> None:
        settings = DispatchSettings(release_timeout_s=0.2, retries=RetrySettings(backoff_s=0.0))
        hosted = Hosted(FailsAgain([2, 3]), dispatching=settings)
        chunks = []
        with pytest.raises(EngineUnavailable):  # noqa: PT012 - it fails behind what it gave
            async for chunk in hosted.dispatcher.generate(generation()):
                chunks.append(chunk)
        assert [token for chunk in chunks for token in chunk.token_ids] == [1, 2, 3, 4, 5]
        (record,) = hosted.dispatcher.ledger.records
        assert (record.output_tokens, record.resumes) == (5, len(record.attempts) - 1)
        assert record.outcome not in ("ok", "cancelled")
        assert hosted.dispatcher.ledger.totals.output_tokens == 5
        await hosted.settle()

    asyncio.run(scenario())
