"""How late the event loop is: whether a timeout says something of a peer, or only of ourselves."""

from __future__ import annotations

import asyncio

TICK_S = 0.05
"""Between two timers whose lateness is measured."""


class LoopLag:
    """A context in which the lateness of timers is added up. Needs a running loop."""

    def __enter__(self) -> LoopLag:
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time()
        self._late_s = 0.0
        self._next()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    @property
    def share(self) -> float:
        """Of the time since it was entered, how much the loop was late, 0 to 1."""
        now = self._loop.time()
        return (self._late_s + max(0.0, now - self._timer.when())) / max(now - self._begin, TICK_S)

    def _next(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._late_s += self._loop.time() - self._timer.when()
        self._next()
