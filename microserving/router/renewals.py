"""Keeps the reservations of one attempt alive for as long as it holds them.

Owns the pause and the task of each reservation. Does not know what a reservation is for; ``holdings`` says when it begins and ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from microserving.errors import EngineUnavailable, MicroservingError
from microserving.program import EngineClient, Request
from microserving.router.alarms import Alarms

_logger = logging.getLogger(__name__)

PER_LEASE = 3
"""Renewals in the life of a lease: two may get lost."""
SHORTEST_S = 0.05
"""Between two renewals, whatever the engine says of its leases."""

_Key = tuple[EngineClient, str]


class Renewals:
    """Used on the event loop only. The pause before the first renewal of a reservation is an alarm, because most
    reservations are used long before; who brings a ``sleep`` of his own has a task from the start."""

    __slots__ = ("_alarms", "_ending", "_sleep", "_tasks", "_waiting")

    def __init__(
        self, sleep: Callable[[float], Awaitable[None]] | None = None, alarms: Alarms | None = None
    ) -> None:
        self._sleep = sleep or asyncio.sleep
        self._alarms = Alarms() if alarms is None and sleep is None else alarms
        self._tasks: dict[_Key, asyncio.Task[None]] = {}
        self._waiting: set[_Key] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Reservations that are being kept alive."""
        return len(self._tasks) + len(self._waiting)

    def start(self, engine: EngineClient, request: Request, lease_ttl_s: float) -> None:
        """Renew from now on. lease_ttl_s: what the engine said when it made the reservation."""
        self.stop(engine, request.request_id)
        key = engine, request.request_id
        if self._alarms is None:
            self._tasks[key] = asyncio.create_task(self._keep(engine, request, lease_ttl_s))
            return

        def due() -> None:
            self._waiting.discard(key)
            self._tasks[key] = asyncio.create_task(self._keep(engine, request, lease_ttl_s, waited=True))

        self._waiting.add(key)
        when = asyncio.get_running_loop().time() + _pause_s(lease_ttl_s)
        self._alarms.set((self, key), when, due)

    def stop(self, engine: EngineClient, request_id: str) -> None:
        """The reservation is used or given back. Idempotent."""
        key = engine, request_id
        if key in self._waiting and self._alarms is not None:
            self._waiting.discard(key)
            self._alarms.unset((self, key))
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Stop all, and wait until no renewal is on its way any more. Idempotent."""
        for engine, request_id in [*self._tasks, *self._waiting]:
            self.stop(engine, request_id)
        if self._ending:
            await asyncio.wait(self._ending)

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
