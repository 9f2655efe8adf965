"""Ends a program's wait at the request's deadline, or when the program does nothing for too long.

One alarm for a whole attempt, however many chunks it gives: a wait costs no clock reading. Does not know what is waited
for; ``Activity`` says whether an engine is being asked, whose silence has limits of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from microserving.errors import DeadlineExceeded, MicroservingError
from microserving.router.alarms import Alarms

WAITING = 1
_STILL_WAITING = 2
"""What ``waiting`` is: since the timer went off the last time, or for longer."""
_AGAIN_S = 1.0
"""A program that swallows its cancellation is cancelled again after so long."""


class Activity(Protocol):
    """What the program does."""

    @property
    def busy(self) -> int:
        """How many answers of engines it waits for now."""

    @property
    def moves(self) -> int:
        """How many have come."""


class ProgramHungError(Exception):
    """The program neither asked an engine nor gave a chunk for ``stall_s`` (twice that at most)."""


class Watchdog:
    """Around each wait: ``check``, then set ``waiting``; afterwards unset it, and ``settle`` when it has ``cancelled``.

    All waits are in one task, until that has ended or ``forget_task`` was called. ``close`` after the last one. Needs a
    running loop. deadline: loop time; None = none. clinging: called each time that a wait goes on although it was cancelled
    ``_AGAIN_S`` ago; then it is cancelled again. (Plain attributes, because this is done for every token.)
    """

    def __init__(
        self,
        activity: Activity,
        *,
        deadline: float | None,
        stall_s: float,
        alarms: Alarms | None = None,
        clinging: Callable[[], None] = lambda: None,
    ) -> None:
        self.waiting = 0
        self.cancelled = 0
        self.error: Exception | None = None
        self._activity = activity
        self._deadline = deadline
        self._stall_s = stall_s
        self._clinging = clinging
        self._loop = loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._moves = -1
        self._cancelling = 0
        self._alarms = Alarms() if alarms is None else alarms
        self._wait_until(loop.time() + stall_s)

    def check(self) -> None:
        """Before a wait. Raises what has become due meanwhile, DeadlineExceeded or ProgramHungError."""
        if self.error is not None:
            raise self.error
        if self._task is None or self._task.done():
            self._task = asyncio.current_task(self._loop)

    @property
    def stepping(self) -> bool:
        """Whether the task of the waits is the one that runs now: what a wait raises then is the program's."""
        return self._task is not None and asyncio.current_task(self._loop) is self._task

    def forget_task(self) -> None:
        """The next waits are in another task."""
        self._task = None

    def settle(self) -> None:
        """After a wait that was ended: raises why. A cancellation that came from elsewhere goes on."""
        task = self._task
        assert task is not None
        for _ in range(self.cancelled):
            task.uncancel()
        self.cancelled = 0
        if self.error is not None and task.cancelling() <= self._cancelling:
            raise self.error

    def close(self) -> None:
        """Idempotent."""
        self._alarms.unset(self)

    def _wait_until(self, when: float) -> None:
        deadline = self._deadline
        self._alarms.set(self, when if deadline is None or when < deadline else deadline, self._fire)

    def _fire(self) -> None:
        now = self._loop.time()
        if self.error is None:
            self.error = self._due(now)
        if self.error is None:
            self._wait_until(now + self._stall_s)
        elif self.waiting and self._task is not None:
            if self.cancelled:
                self._clinging()
            else:
                self._cancelling = self._task.cancelling()
            self.cancelled += 1
            self._task.cancel()
            self._alarms.set(self, now + _AGAIN_S, self._fire)

    def _due(self, now: float) -> Exception | None:
        if self._deadline is not None and now >= self._deadline:
            return deadline_exceeded()
        activity = self._activity
        if self.waiting == _STILL_WAITING and not activity.busy and activity.moves == self._moves:
            return ProgramHungError()
        if self.waiting:
            self.waiting = _STILL_WAITING
        self._moves = -1 if activity.busy else activity.moves
        return None


def deadline_exceeded() -> MicroservingError:
    """What a request ends with at its deadline."""
    return DeadlineExceeded("the request took longer than its timeout")
