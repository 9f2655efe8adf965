"""What comes for an engine, estimated from the prompts that came of late. Times in seconds, from any clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import NamedTuple

KEPT = 32
"""Prompts that tell what comes; none that came longer ago than so many take an engine to compute."""
FEW = 4
"""Fewer say nothing of how often they come."""
LEAST_S = 1e-3
"""All that come at once came within so long."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What comes for an engine, per request in the mean.

    rate: requests a second; 0.0 = unknown or none. tokens: of their prompts, without what was cached. variation: of
    these tokens, the variance over the square of the mean. output_tokens: as many as they want.
    """

    rate: float = 0.0
    tokens: float = 0.0
    variation: float = 0.0
    output_tokens: float = 0.0


class Arrival(NamedTuple):
    at: float
    tokens: int
    output_tokens: int


class Arrivals:
    """The last prompts that came for one engine."""

    def __init__(self) -> None:
        self._last: deque[Arrival] = deque(maxlen=KEPT)

    def add(self, at: float, tokens: int, output_tokens: int) -> None:
        """tokens: without what was cached."""
        self._last.append(Arrival(at, tokens, output_tokens))

    def demand(self, now: float, prefill_rate: float, waiting_tokens: float) -> Demand:
        """prefill_rate: tokens/s; 0.0 = unknown. waiting_tokens: of prompts that came and are not computed yet; they count as if
        they came once more in the same time, since they are to be done besides what comes."""
        last = self._last
        if not last:
            return Demand()
        if prefill_rate:
            since = now - KEPT * max(1.0, fmean(each.tokens for each in last)) / prefill_rate
            while len(last) > 1 and last[0].at < since:
                last.popleft()
        tokens = fmean(each.tokens for each in last)
        outputs = fmean(each.output_tokens for each in last)
        variation = pvariance([each.tokens for each in last], tokens) / max(1.0, tokens * tokens)
        rate = 0.0
        if len(last) >= FEW:
            waiting = waiting_tokens / max(1.0, tokens)
            rate = (len(last) - 1 + waiting) / max(LEAST_S, now - last[0].at)
        return Demand(rate, tokens, variation, outputs)
