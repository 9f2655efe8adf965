"""Serves every request by attempts of the router program, and ends what a request leaves behind.

The front's ``Backend``. Owns the attempts and their clean-ups; does not know HTTP, nor which program is in charge.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from microserving.errors import NoEngine, ShuttingDown
from microserving.front import ServedModel
from microserving.program import Cluster, Request
from microserving.protocol.generation import GenerationChunk, GenerationRequest
from microserving.router.attempt import Attempt
from microserving.router.engine_client import InFlight
from microserving.router.program_host import ProgramHost
from microserving.tokenizer import Tokenizer


class Served(Protocol):
    """What the engines serve, as far as the router knows (``health.HealthMonitor``)."""

    @property
    def model(self) -> ServedModel | None: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def ready(self) -> bool: ...

    async def refresh(self) -> None:
        """Look for engines now. Returns soon; bounded however often it is called."""


class Dispatcher:
    """in_flight: shared with the engine clients. release_timeout_s: how long one engine may take to free things."""

    def __init__(
        self,
        host: ProgramHost,
        cluster: Cluster,
        in_flight: InFlight,
        served: Served,
        *,
        release_timeout_s: float = 5.0,
    ) -> None:
        self._host = host
        self._cluster = cluster
        self._in_flight = in_flight
        self._served = served
        self._release_timeout_s = release_timeout_s
        self._releases: set[asyncio.Task[None]] = set()
        self._accepting = True
        self._running = 0

    @property
    def running(self) -> int:
        """Attempts under way now."""
        return self._running

    @property
    def model(self) -> ServedModel | None:
        return self._served.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._served.tokenizer

    @property
    def ready(self) -> bool:
        return self._accepting and self._served.ready

    async def refresh(self) -> None:
        if self._accepting:
            await self._served.refresh()

    def refuse_requests(self) -> None:
        """Take no more requests; those that run go on."""
        self._accepting = False

    async def stop(self) -> None:
        """Wait for all clean-ups (each is bounded). Call when no request runs. Idempotent."""
        while self._releases:
            await asyncio.wait(self._releases)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """See ``Backend.generate``. A program that finds no engine is asked once more, after a look for engines."""
        if not self._accepting:
            raise ShuttingDown
        looked = began = False
        while True:
            attempt = self._begin(request, "-again" if looked else "")
            try:
                async for chunk in attempt.chunks:
                    began = True
                    yield chunk
                return
            except NoEngine:
                if looked or began:
                    raise
            finally:
                self._finish(attempt)
            await self._served.refresh()
            looked = True

    def _begin(self, request: GenerationRequest, suffix: str) -> Attempt:
        own = Request(
            request_id=request.request_id + suffix,  # an engine may still be freeing what the last one held
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            stop=request.stop,
        )
        self._running += 1
        return Attempt(self._host.acquire(), own, self._cluster, self._in_flight)

    def _finish(self, attempt: Attempt) -> None:
        """Leave nothing behind. In the background: whoever ended the request does not wait for it."""
        self._running -= 1
        if attempt.end():
            self._host.release(attempt.program, attempt.outcome)
            return
        task = asyncio.create_task(self._release(attempt))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, attempt: Attempt) -> None:
        try:
            await attempt.release(self._release_timeout_s)
        finally:
            self._host.release(attempt.program, attempt.outcome)
