"""Averages over an engine's last steps, as it tells them. Old steps fade with the time that newer ones took. Pure: seconds
are handed in."""

from __future__ import annotations

import math
from typing import Final

FADE_S: Final = 10.0
"""Seconds of steps after which a step has 1/e of its weight."""
LEAST_SPREAD: Final = 1.0
"""Sum of squared deviations in decodes, weighed, below which steps say little of what one decode more takes."""


class Rate:
    """Something per second."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    @property
    def per_s(self) -> float:
        """0.0 while nothing was observed."""
        return self._amount / self._seconds if self._seconds else 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """seconds > 0."""
        kept = math.exp(-seconds / FADE_S)
        self._amount = kept * self._amount + amount
        self._seconds = kept * self._seconds + seconds


class DecodeTime:
    """Seconds of a step of decodes alone as a line over their number: least squares with fading."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._decodes = self._seconds = 0.0  # weighted means
        self._spread = self._covariance = 0.0  # weighted sums of squared deviations

    @property
    def per_decode_s(self) -> float:
        """What one decode more takes; in [0, the whole]."""
        if not self._weight:
            return 0.0
        slope = self._covariance / (self._spread + LEAST_SPREAD)
        return min(max(slope, 0.0), self._seconds / self._decodes)

    @property
    def base_s(self) -> float:
        """What a step takes besides; 0.0 while nothing was observed."""
        return max(0.0, self._seconds - self.per_decode_s * self._decodes)

    def at(self, decodes: int) -> float:
        return self.base_s + self.per_decode_s * decodes

    def observe(self, decodes: int, seconds: float) -> None:
        """A step with ``decodes`` > 0 took ``seconds`` > 0."""
        kept = math.exp(-seconds / FADE_S)
        self._weight = kept * self._weight + 1.0
        self._spread *= kept
        self._covariance *= kept
        from_mean = decodes - self._decodes
        self._decodes += from_mean / self._weight
        self._covariance += from_mean * (seconds - self._seconds) * (1.0 - 1.0 / self._weight)
        self._spread += from_mean * (decodes - self._decodes)
        self._seconds += (seconds - self._seconds) / self._weight
