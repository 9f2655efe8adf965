"""Runs the router program for every request, and ends what a request leaves behind.

The front's ``Backend``. Owns the attempts, their clean-ups and the program's ``plan``; does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from microserving.errors import NoEngine, ShuttingDown
from microserving.front import ServedModel
from microserving.program import Cluster, Program, Request
from microserving.protocol.generation import GenerationChunk, GenerationRequest
from microserving.router.attempt import Attempt
from microserving.router.engine_client import InFlight
from microserving.router.program_loader import LoadedProgram
from microserving.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)


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


class ProgramHost:
    """in_flight: shared with the engine clients. release_timeout_s: how long one engine may take to free things."""

    def __init__(
        self,
        program: LoadedProgram,
        cluster: Cluster,
        in_flight: InFlight,
        served: Served,
        *,
        release_timeout_s: float = 5.0,
    ) -> None:
        self.program = program
        self._cluster = cluster
        self._in_flight = in_flight
        self._served = served
        self._release_timeout_s = release_timeout_s
        self._releases: set[asyncio.Task[None]] = set()
        self._plan: asyncio.Task[None] | None = None
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

    def start(self) -> None:
        """Run the program's ``plan``, if it has one."""
        if type(self.program.instance).plan is not Program.plan:
            self._plan = asyncio.create_task(self._run_plan())

    def refuse_requests(self) -> None:
        """Take no more requests; those that run go on."""
        self._accepting = False

    async def stop(self) -> None:
        """End the plan and wait for all clean-ups (each is bounded). Call when no request runs. Idempotent."""
        if self._plan is not None:
            self._plan.cancel()
            await asyncio.wait([self._plan])
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
        return Attempt(self.program, own, self._cluster, self._in_flight)

    def _finish(self, attempt: Attempt) -> None:
        """Leave nothing behind. In the background: whoever ended the request does not wait for it."""
        self._running -= 1
        if not attempt.end():
            task = asyncio.create_task(attempt.release(self._release_timeout_s))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _run_plan(self) -> None:
        try:
            await self.program.instance.plan(self._cluster)
        except Exception as error:  # noqa: BLE001 - the wall: a plan may raise anything, requests go on
            where = self.program.locate(error)
            _logger.error("the router program's plan failed at %s: %r", where, error)
