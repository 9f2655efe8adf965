"""What comes for an engine, estimated from the prompts that came of late. Times in seconds, from any clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

KEPT = 32
"""Prompts that tell what comes; none that came longer ago than so many take an engine to compute."""
FEW = 4
"""Fewer say nothing of how often they come."""
WAITING = 12.0
"""What waits is to be done soon: one such prompt counts as so many that came of late."""
LEAST_S = 1e-3
"""All that come at once came within so long."""
MAX_OUTPUT_TOKENS = 256
"""Few outputs are as long as a larger bound allows."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What comes for an engine, per request in the mean.

    rate: requests a second; 0.0 = unknown or none. tokens: of their prompts, those that two engines may share. variation:
    of these tokens, the variance over the square of the mean. output_tokens: as many as they want.
    """

    rate: float = 0.0
    tokens: float = 0.0
    variation: float = 0.0
    output_tokens: float = 0.0


class Arrival(NamedTuple):
    """One prompt, as ``Arrivals.add`` is told of it."""

    at: float
    tokens: int
    output_tokens: int


class Arrivals:
    """The last prompts that came for one engine. Their lengths are told without the longest one: that one such prompt came
    does not say that others will."""

    def __init__(self) -> None:
        self._last: deque[Arrival] = deque()
        self._tokens = self._squares = self._outputs = 0  # their sums

    def add(self, at: float, tokens: int, output_tokens: int) -> None:
        """tokens: to be computed, by this engine or the other one. output_tokens: at most so many."""
        if len(self._last) == KEPT:
            self._forget_oldest()
        output_tokens = min(output_tokens, MAX_OUTPUT_TOKENS)
        self._last.append(Arrival(at, tokens, output_tokens))
        self._tokens += tokens
        self._squares += tokens * tokens
        self._outputs += output_tokens

    @property
    def tokens(self) -> float:
        """Of a prompt in the mean; 0.0 without any."""
        return self._lengths()[0]

    def demand(self, now: float, prefill_rate: float, waiting: float = 0.0) -> Demand:
        """prefill_rate: tokens/s at which such prompts are computed; 0.0 = unknown. waiting: how many of them are still to
        be computed. Forgets what came too long ago."""
        last = self._last
        if prefill_rate:
            kept_s = KEPT * max(1.0, self.tokens) / prefill_rate
            while len(last) > 1 and now - last[0].at > kept_s:
                self._forget_oldest()
        count = len(last)
        if not count:
            return Demand()
        tokens, variation = self._lengths()
        came = count - 1 + WAITING * waiting
        rate = came / max(LEAST_S, now - last[0].at) if count >= FEW else 0.0
        return Demand(rate, tokens, variation, self._outputs / count)

    def _lengths(self) -> tuple[float, float]:
        """``Demand.tokens`` and ``Demand.variation``."""
        count = len(self._last) - 1
        if count < 1:
            return float(self._tokens), 0.0
        longest = max(arrival.tokens for arrival in self._last)
        tokens, squares = (self._tokens - longest) / count, (self._squares - longest * longest) / count
        return tokens, max(0.0, squares / (tokens * tokens) - 1.0) if tokens else 0.0

    def _forget_oldest(self) -> None:
        oldest = self._last.popleft()
        self._tokens -= oldest.tokens
        self._squares -= oldest.tokens * oldest.tokens
        self._outputs -= oldest.output_tokens
