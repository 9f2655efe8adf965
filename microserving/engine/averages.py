"""Averages over an engine's last steps. In what it tells, old steps fade with the time that newer ones took. Pure: seconds
are handed in."""

from __future__ import annotations

import math
from typing import Final

FADE_S: Final = 10.0
"""Seconds of steps after which a step has 1/e of its weight."""
LEAST_SPREAD: Final = 1.0
"""``Line.least_spread`` in decodes, squared."""


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


class Line:
    """One thing as a straight line over another: least squares, in which older observations fade.

    least_spread: the sum of squared deviations from the mean of the latter, weighed, below which observations say little
    of the slope; it is then taken as nearly flat.
    """

    def __init__(self, least_spread: float) -> None:
        self._least_spread = least_spread
        self._weight = 0.0
        self._spread = self._covariance = 0.0  # weighted sums
        self.mean_x = self.mean_y = 0.0
        """Weighted; the line goes through them."""

    @property
    def known(self) -> bool:
        return self._weight > 0.0

    @property
    def slope(self) -> float:
        return self._covariance / (self._spread + self._least_spread)

    def observe(self, x: float, y: float, kept: float) -> None:
        """kept: how much of their weights the earlier ones keep, in [0, 1]."""
        self._spread *= kept
        self._covariance *= kept
        self._weight = kept * self._weight + 1.0
        from_mean = x - self.mean_x
        self.mean_x += from_mean / self._weight
        self._covariance += from_mean * (y - self.mean_y) * (1.0 - 1.0 / self._weight)
        self._spread += from_mean * (x - self.mean_x)
        self.mean_y += (y - self.mean_y) / self._weight


class DecodeTime:
    """Seconds of a step of decodes alone as a line over their number."""

    def __init__(self) -> None:
        self._line = Line(LEAST_SPREAD)

    @property
    def per_decode_s(self) -> float:
        """What one decode more takes; in [0, the whole]."""
        line = self._line
        return min(max(line.slope, 0.0), line.mean_y / line.mean_x) if line.known else 0.0

    @property
    def base_s(self) -> float:
        """What a step takes besides; 0.0 while nothing was observed."""
        return max(0.0, self._line.mean_y - self.per_decode_s * self._line.mean_x)

    def at(self, decodes: int) -> float:
        return self.base_s + self.per_decode_s * decodes

    def observe(self, decodes: int, seconds: float) -> None:
        """A step with ``decodes`` > 0 took ``seconds`` > 0."""
        self._line.observe(decodes, seconds, math.exp(-seconds / FADE_S))
