"""Many timers that hardly ever go off, in one timer of the event loop.

What every request sets and nearly every request takes back (its deadline, the renewal of a lease) costs an entry in a
dict here. Does not know what they are for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final

_REST_S: Final = 0.005
"""Between two looks at all that are set: how much later than asked an alarm may go off when there are many."""
_NEVER: Final = float("inf")


class Alarms:
    """Used on one event loop only, which must run. Times are the loop's. An alarm goes off once."""

    def __init__(self) -> None:
        self._set: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._next = _NEVER
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many are set."""
        return len(self._set)

    def set(self, key: Hashable, when: float, alarm: Callable[[], None]) -> None:
        """Call ``alarm`` at ``when``; instead of the one that is set for ``key``. It must not raise."""
        self._set[key] = when, alarm
        if when < self._next:
            self._look_at(when)

    def unset(self, key: Hashable) -> None:
        """Idempotent."""
        self._set.pop(key, None)

    def _look_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next = when
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        """The alarm that was set first has come, if it is still set."""
        now = asyncio.get_running_loop().time()
        self._timer, self._next = None, _NEVER
        for key, (when, alarm) in list(self._set.items()):
            if when <= now and self._set.get(key) == (when, alarm):
                del self._set[key]
                alarm()
        if self._set:
            first = min(when for when, _ in self._set.values())
            if first < self._next:
                self._look_at(max(first, now + _REST_S))
