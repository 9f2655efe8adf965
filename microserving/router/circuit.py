"""Keeps an engine that answers, but fails request after request, out of the pools until one trial request succeeded.

Pure: no clock, no engine. ``engine_registry`` asks and tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CircuitState = Literal["closed", "open", "half_open"]


@dataclass(frozen=True, slots=True)
class CircuitSettings:
    """failures: in a row, until it opens. pause_s: until a trial; doubled after each trial that fails, up to
    max_pause_s."""

    failures: int = 5
    pause_s: float = 1.0
    max_pause_s: float = 30.0


class Circuit:
    """Times are loop times, given by the caller."""

    def __init__(self, settings: CircuitSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._trips = 0
        self._until: float | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing is wrong."""
        return self._until is None

    def state(self, now: float) -> CircuitState:
        """half_open: one request may try the engine."""
        if self._until is None:
            return "closed"
        return "open" if now < self._until else "half_open"

    def succeeded(self) -> bool:
        """A request got an answer. True: that closed it."""
        closed = self._until is not None
        self.reset()
        return closed

    def failed(self, now: float) -> bool:
        """The engine failed a request. True: that opened it (again)."""
        self._failures += 1
        if self._until is None and self._failures < self._settings.failures:
            return False
        if self._until is not None and now < self._until:
            return False  # of a request that was on its way
        self._until = now + min(self._settings.pause_s * 2.0**self._trips, self._settings.max_pause_s)
        self._trips += 1
        return True

    def reset(self) -> None:
        """The engine was started anew, or proved to be well."""
        self._failures = self._trips = 0
        self._until = None
