"""Whether, and after which pause, a request that failed is tried again.

Owns the budget that all requests share. Does not know attempts or engines; ``dispatch`` asks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from microserving.errors import (
    EngineUnavailable,
    LeaseError,
    MicroservingError,
    NoEngine,
    Overloaded,
    Preempted,
    TransferFailed,
)

_ENGINES_FAULT = (EngineUnavailable, TransferFailed, LeaseError, Overloaded, Preempted, NoEngine)


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """max_attempts: in a row without a new token; max_resumes: of one request, however far it came in between (a
    request that brings engines down must not see them all).

    budget_share: retries may be this share of the requests; budget_burst: and so many more at once (an engine that dies
    hands back all that it had). backoff_s: mean pause before the first retry, doubled for each further one, at most
    max_backoff_s.
    """

    max_attempts: int = 3
    max_resumes: int = 8
    budget_share: float = 0.2
    budget_burst: int = 256
    backoff_s: float = 0.01
    max_backoff_s: float = 1.0


class RetryBudget:
    """A token bucket that requests fill and retries empty, so that a sick cluster is not hammered."""

    def __init__(self, settings: RetrySettings) -> None:
        self._share = settings.budget_share
        self._burst = float(settings.budget_burst)
        self._tokens = self._burst

    @property
    def left(self) -> float:
        """Retries that may be made now."""
        return self._tokens

    def deposit(self) -> None:
        """A request came."""
        self._tokens = min(self._burst, self._tokens + self._share)

    def withdraw(self) -> bool:
        """Take a retry out of it. False: there is none."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def charge(self) -> None:
        """A resume: it is never refused, because its client has seen output already."""
        self._tokens = max(0.0, self._tokens - 1.0)


def is_engines_fault(error: MicroservingError) -> bool:
    """Whether the same request may well succeed on another engine."""
    return isinstance(error, _ENGINES_FAULT)


def backoff_s(
    settings: RetrySettings, failures: int, uniform: Callable[[float, float], float] = random.uniform
) -> float:
    """Pause before the next attempt, with jitter. failures: in a row, from 1."""
    mean = min(settings.backoff_s * 2.0 ** (failures - 1), settings.max_backoff_s)
    return uniform(0.0, 2.0 * mean)
