"""Keeps the reservations of one attempt alive for as long as it holds them.

Owns the pauses and the renewals of each reservation. Does not know what a reservation is for; ``holdings`` says when it
begins and ends.
"""

from __future__ import annotations

import asyncio
import logging

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
    """Used on the event loop only. A pause is an alarm, since most reservations are used before the first one is over."""

    __slots__ = ("_alarms", "_ending", "_kept")

    def __init__(self, alarms: Alarms | None = None) -> None:
        self._alarms = Alarms() if alarms is None else alarms
        self._kept: dict[_Key, asyncio.Task[None] | None] = {}  # None: in a pause
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Reservations that are being kept alive."""
        return len(self._kept)

    def start(self, engine: EngineClient, request: Request, lease_ttl_s: float) -> None:
        """Renew from now on. lease_ttl_s: what the engine said when it made the reservation."""
        self.stop(engine, request.request_id)
        self._pause(engine, request, lease_ttl_s)

    def stop(self, engine: EngineClient, request_id: str) -> None:
        """The reservation is used or given back. Idempotent."""
        key = engine, request_id
        if key not in self._kept:
            return
        task = self._kept.pop(key)
        if task is None:
            self._alarms.unset((self, key))
            return
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Stop all, and wait until no renewal is on its way any more. Idempotent."""
        for engine, request_id in list(self._kept):
            self.stop(engine, request_id)
        if self._ending:
            await asyncio.wait(self._ending)

    def _pause(self, engine: EngineClient, request: Request, lease_ttl_s: float) -> None:
        """Until the next renewal."""
        key = engine, request.request_id

        def due() -> None:
            self._kept[key] = asyncio.create_task(self._renew(engine, request, lease_ttl_s))

        self._kept[key] = None
        self._alarms.set((self, key), asyncio.get_running_loop().time() + _pause_s(lease_ttl_s), due)

    async def _renew(self, engine: EngineClient, request: Request, lease_ttl_s: float) -> None:
        """The last one when the engine refuses or knows no renewal: the verbs then fail by themselves, if they do."""
        try:
            renewed = await engine.renew(request)
        except MicroservingError as error:
            _logger.warning(
                "%s did not renew the lease of request %s: %s", engine.id, request.request_id, error
            )
            renewed = lease_ttl_s if isinstance(error, EngineUnavailable) else None
        if renewed is None:
            del self._kept[engine, request.request_id]
        else:
            self._pause(engine, request, renewed)


def _pause_s(lease_ttl_s: float) -> float:
    return max(lease_ttl_s / PER_LEASE, SHORTEST_S)
