"""Ends a program's wait at the request's deadline, or when the program does nothing for too long.

One timer for a whole attempt, however many chunks it gives: a wait costs a clock reading. Does not know what is waited
for; ``Idle`` says whether an engine is being asked, whose silence has limits of its own.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from microserving.errors import DeadlineExceeded, MicroservingError

_AGAIN_S = 1.0
"""A program that swallows its cancellation is cancelled again after so long."""


class Idle(Protocol):
    """What the program does just now."""

    @property
    def busy(self) -> int:
        """How many answers of engines it waits for."""

    @property
    def idle_since(self) -> float:
        """When it last stopped waiting for one (loop time)."""


class ProgramHungError(Exception):
    """The program neither asked an engine nor gave a chunk for ``stall_s``."""


class Watchdog:
    """``begin`` and ``end`` around each wait, in the task that waits; ``close`` after the last. Needs a running loop.

    deadline: loop time; None = none.
    """

    def __init__(self, idle: Idle, *, deadline: float | None, stall_s: float) -> None:
        self._idle = idle
        self._deadline = deadline
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._since = 0.0
        self._cancelling = 0
        self._cancels = 0
        self._error: Exception | None = None

    def begin(self) -> None:
        """Raises DeadlineExceeded when it is too late already."""
        now = self._loop.time()
        if self._deadline is not None and now >= self._deadline:
            raise deadline_exceeded()
        self._since = now
        self._task = task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()
        if self._timer is None:
            self._arm()

    def end(self) -> None:
        """Raises what ended the wait, if it was the watchdog: DeadlineExceeded or ProgramHungError. A cancellation from
        elsewhere goes on."""
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        error, self._error = self._error, None
        for _ in range(self._cancels):
            task.uncancel()
        self._cancels = 0
        if task.cancelling() <= self._cancelling:
            raise error

    def close(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        when = max(self._since, self._idle.idle_since) + self._stall_s
        if self._deadline is not None:
            when = min(when, self._deadline)
        self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._task is None:
            return  # the chunk's reader is slow; the next wait arms it again
        now = self._loop.time()
        if self._error is None:
            self._error = self._expired(now)
        if self._error is None:
            self._arm()
            return
        self._cancels += 1
        self._task.cancel()
        self._timer = self._loop.call_at(now + _AGAIN_S, self._fire)

    def _expired(self, now: float) -> Exception | None:
        if self._deadline is not None and now >= self._deadline:
            return deadline_exceeded()
        if self._idle.busy:
            self._since = now
        hung = now - max(self._since, self._idle.idle_since) >= self._stall_s
        return ProgramHungError() if hung else None


def deadline_exceeded() -> MicroservingError:
    """What a request ends with at its deadline."""
    return DeadlineExceeded("the request took longer than its timeout")
