"""Latencies of late, as a program sees them: time to the first token and time between tokens, by pool.

Fed by the router for every request that it serves; read by programs, mostly in ``plan``. Bounded.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from microserving.program.engine_client import EngineRole

DEFAULT_HORIZON_S = 30.0
_MAX_SAMPLES = 2048


class Window:
    """The samples of the last ``horizon_s`` seconds, at most the newest ``max_samples``. Values in seconds."""

    def __init__(self, clock: Callable[[], float], horizon_s: float, max_samples: int = _MAX_SAMPLES) -> None:
        self._clock = clock
        self._horizon_s = horizon_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=max_samples)

    def __len__(self) -> int:
        self._drop_old()
        return len(self._samples)

    def add(self, seconds: float) -> None:
        self._samples.append((self._clock(), seconds))

    def quantile(self, q: float) -> float | None:
        """The smallest sample that a share ``q`` of all does not exceed; None without samples. q: in [0, 1].

        Raises: ValueError for another q.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"a quantile is in [0, 1], not {q}")
        self._drop_old()
        ordered = sorted(value for _, value in self._samples)
        return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else None

    def clear(self) -> None:
        self._samples.clear()

    def _drop_old(self) -> None:
        oldest = self._clock() - self._horizon_s
        while self._samples and self._samples[0][0] < oldest:
            self._samples.popleft()


class PoolMetrics:
    """ttft: seconds from a request's arrival to its first token. itl: seconds between two output tokens, means of a few."""

    def __init__(self, clock: Callable[[], float], horizon_s: float) -> None:
        self.ttft = Window(clock, horizon_s)
        self.itl = Window(clock, horizon_s)


class ClusterMetrics:
    """Latencies by the pool of the engine that generated; ``all`` has every request.

    clock: seconds, monotonic. horizon_s: how far back the windows reach.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, horizon_s: float = DEFAULT_HORIZON_S
    ) -> None:
        self.prefill = PoolMetrics(clock, horizon_s)
        self.decode = PoolMetrics(clock, horizon_s)
        self.all = PoolMetrics(clock, horizon_s)

    def add_ttft(self, role: EngineRole, seconds: float) -> None:
        """The router saw the first token of a request that an engine of this role generated."""
        for pool in self._pools(role):
            pool.ttft.add(seconds)

    def add_itl(self, role: EngineRole, seconds: float) -> None:
        """The mean time between two tokens over the last few of a request; longer ones count more often."""
        for pool in self._pools(role):
            pool.itl.add(seconds)

    def clear(self) -> None:
        """Forget all: what was measured does not tell of what comes (another program, other roles)."""
        for pool in (self.prefill, self.decode, self.all):
            pool.ttft.clear()
            pool.itl.clear()

    def _pools(self, role: EngineRole) -> tuple[PoolMetrics, ...]:
        if role == "hybrid":
            return self.prefill, self.decode, self.all
        return (self.prefill if role == "prefill" else self.decode), self.all
