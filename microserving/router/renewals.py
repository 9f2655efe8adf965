"""Keeps the reservations of one attempt alive for as long as it holds them.

Owns one task a reservation. Does not know what a reservation is for; ``holdings`` says when it begins and ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from microserving.errors import EngineUnavailable, MicroservingError
from microserving.program import EngineClient, Request

_logger = logging.getLogger(__name__)

PER_LEASE = 3
"""Renewals in the life of a lease: two may get lost."""
SHORTEST_S = 0.05
"""Between two renewals, whatever the engine says of its leases."""

_Key = tuple[EngineClient, str]


class Renewals:
    """Used on the event loop only."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._sleep = sleep
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._timers: dict[_Key, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Reservations that are being kept alive."""
        return len(self._tasks) + len(self._timers)

    def start(self, engine: EngineClient, request: Request, lease_ttl_s: float) -> None:
        """Renew from now on. lease_ttl_s: what the engine said when it made the reservation."""
        self.stop(engine, request.request_id)
        key = engine, request.request_id
        if (
            self._sleep is asyncio.sleep
        ):  # most reservations are used long before: a timer costs less than a task
            loop = asyncio.get_running_loop()
            self._timers[key] = loop.call_later(
                _pause_s(lease_ttl_s), self._due, engine, request, lease_ttl_s
            )
        else:
            self._tasks[key] = asyncio.create_task(self._keep(engine, request, lease_ttl_s))

    def stop(self, engine: EngineClient, request_id: str) -> None:
        """The reservation is used or given back. Idempotent."""
        timer = self._timers.pop((engine, request_id), None)
        if timer is not None:
            timer.cancel()
        task = self._tasks.pop((engine, request_id), None)
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Stop all, and wait until no renewal is on its way any more. Idempotent."""
        for engine, request_id in [*self._tasks, *self._timers]:
            self.stop(engine, request_id)
        if self._ending:
            await asyncio.wait(self._ending)

    def _due(self, engine: EngineClient, request: Request, lease_ttl_s: float) -> None:
        key = engine, request.request_id
        del self._timers[key]
        self._tasks[key] = asyncio.create_task(self._keep(engine, request, lease_ttl_s, waited=True))

    async def _keep(
        self, engine: EngineClient, request: Request, lease_ttl_s: float, *, waited: bool = False
    ) -> None:
        """Ends when the engine refuses or knows no renewal: the verbs then fail by themselves, if they do."""
        while True:
            if not waited:
                await self._sleep(_pause_s(lease_ttl_s))
            waited = False
            try:
                renewed = await engine.renew(request)
            except MicroservingError as error:
                _logger.warning(
                    "%s did not renew the lease of request %s: %s", engine.id, request.request_id, error
                )
                if not isinstance(error, EngineUnavailable):
                    return
            else:
                if renewed is None:
                    return
                lease_ttl_s = renewed


def _pause_s(lease_ttl_s: float) -> float:
    return max(lease_ttl_s / PER_LEASE, SHORTEST_S)
