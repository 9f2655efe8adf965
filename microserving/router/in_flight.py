"""How many requests the router has on each engine, and waiting until there are none."""

from __future__ import annotations

import asyncio
from collections import Counter

from microserving.program import EngineClient


class InFlight(Counter[EngineClient]):
    """An engine without any is absent. Used on the event loop only."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[object, list[asyncio.Future[None]]] = {}

    def __delitem__(self, engine: object) -> None:
        super(Counter, self).__delitem__(engine)  # type: ignore[arg-type]
        for waiter in self._waiting.pop(engine, ()) if self._waiting else ():
            if not waiter.done():
                waiter.set_result(None)

    async def until_idle(self, engine: EngineClient, timeout_s: float | None = None) -> bool:
        """Wait until no request is on ``engine``. False: it took longer than ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while engine in self:
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiting.setdefault(engine, []).append(waiter)
                    await waiter
        except TimeoutError:
            return False
        return True
