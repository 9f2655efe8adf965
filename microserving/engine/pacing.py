"""How many prompt tokens a step may compute beside running decodes, so that these keep their pace.

Owns: a small model of what a step costs, learnt from the steps themselves, and the budget that follows from it. Pure:
seconds are handed in. Does not know: which prompt is computed, who decodes.

A step with decodes and prompt tokens takes about ``D + tokens * cost(position)``: D is what a step of the decodes alone
takes (median of the last few), cost what one prompt token adds. It grows with the token's position (attention) and is
measured where it is used, in steps with decodes (a large chunk's tokens cost less each): a straight line over the
positions of the last such steps, older ones forgotten. The budget is the most tokens for which the sum stays within
``max_itl_ratio * D``, and at most twice what the last such step had or could have afforded, so that a wrong guess costs
one step.

On a busy machine a measurement says little: a step of decodes may take longer than one with prompt tokens. So no token
is ever free, one measurement moves the line only so far up or down, and a step that was much too long shortens the next
one whatever the line says.

A floor keeps prompts going whatever the model says. While D is unknown or old, one step has no prompt tokens to measure
it (a single one would not do: at a high position the first costs as much as several); never two in a row, so no prompt
ever stands still.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

from microserving.engine.averages import Line

FLOOR_TOKENS: Final = 4
"""The least prompt tokens of a step that may have some."""
DECODE_STEPS: Final = 5
"""The last steps of decodes alone, of whose times D is the median."""
KEPT: Final = 0.9
"""How much of its weight a step keeps in the line when a newer one comes."""
PRIOR_VARIANCE: Final = 32.0**2
"""Positions closer together than about its root say little about the slope; it is then taken as nearly flat."""
OUTLIER: Final = 4.0
"""A token counts as at most so many times dearer or cheaper than expected: the machine was busy with something else."""
LEAST_SHARE: Final = 1 / 16
"""Of the share of a step that prompt tokens are meant to take: less than this of it they never count as."""
MEASURE_EVERY: Final = 32
"""Steps with prompt tokens after which D is measured again."""
MEASURE_EVERY_AT_FIRST: Final = 4
"""The same while D is the median of too few."""


class TokenCost:
    """Seconds of one prompt token as a line over its position."""

    def __init__(self) -> None:
        self._line = Line(PRIOR_VARIANCE)

    @property
    def known(self) -> bool:
        return self._line.known

    @property
    def slope(self) -> float:
        """Seconds per token and position; never negative."""
        return max(0.0, self._line.slope)

    def at(self, position: float) -> float:
        """Seconds of a token at ``position``; at least a quarter of the mean, however far the line goes down."""
        mean_s = self._line.mean_y
        return max(mean_s + self.slope * (position - self._line.mean_x), mean_s / 4)

    def observe(self, position: float, seconds: float) -> None:
        """Tokens around ``position`` took ``seconds`` each, more than 0."""
        if self.known:
            expected = self.at(position)
            seconds = min(max(seconds, expected / OUTLIER), OUTLIER * expected)
        self._line.observe(position, seconds, KEPT)


class Pacer:
    """Ask for the ``budget`` before a step, ``observe`` the step after it."""

    def __init__(self, max_itl_ratio: float) -> None:
        self._ratio = max_itl_ratio
        self._least_share = LEAST_SHARE * (1.0 - 1.0 / max_itl_ratio)
        self._measured: deque[float] = deque(maxlen=DECODE_STEPS)  # seconds
        self._measured_with = 0  # decodes in the last measurement of D
        self._mixed = 0  # steps with decodes and prompt tokens since then
        self._limit = 2.0 * FLOOR_TOKENS  # twice what the last such step had, or should have had
        self._cost = TokenCost()

    def budget(self, decodes: int, position: int, most: int) -> int:
        """Prompt tokens for a step beside so many decodes; 0 = it measures them. position: of the first of the tokens;
        most: the step's limit."""
        if decodes == 0:
            return most
        if not self._measured or self._must_measure(decodes):
            return 0
        tokens = FLOOR_TOKENS
        if self._cost.known:
            cost = self._cost.at(position)
            tokens = _tokens_within((self._ratio - 1.0) * self._decode_s, cost, self._cost.slope)
        return min(max(min(tokens, int(self._limit)), FLOOR_TOKENS), most)

    def observe(self, decodes: int, tokens: int, position: float, seconds: float) -> None:
        """A step ran. tokens: of prompts, at the mean ``position``."""
        if decodes == 0:
            return
        if tokens == 0:
            if self._changed_much(decodes):
                self._measured.clear()
            self._measured.append(seconds)
            self._measured_with, self._mixed = decodes, 0
            return
        self._mixed += 1
        self._limit = 2.0 * tokens
        if self._measured:
            self._observe_mixed(tokens, position, max(seconds, 1e-9))

    def _observe_mixed(self, tokens: int, position: float, seconds: float) -> None:
        more_s = max(seconds - self._decode_s, self._least_share * seconds)
        self._cost.observe(position, more_s / tokens)
        self._limit *= min(1.0, (self._ratio - 1.0) * self._decode_s / more_s)

    @property
    def _decode_s(self) -> float:
        """D, once measured."""
        return statistics.median(self._measured)

    def _must_measure(self, decodes: int) -> bool:
        """Never two steps in a row."""
        few = len(self._measured) < DECODE_STEPS
        every = MEASURE_EVERY_AT_FIRST if few else MEASURE_EVERY
        return self._mixed >= every or (self._mixed > 0 and self._changed_much(decodes))

    def _changed_much(self, decodes: int) -> bool:
        return not self._measured_with / 2 < decodes < self._measured_with * 2


def _tokens_within(seconds: float, first: float, slope: float) -> int:
    """The most tokens whose costs ``first``, ``first + slope``, ... sum up to at most ``seconds``."""
    if slope * seconds <= 1e-9 * first * first:
        return int(seconds / max(first, 1e-9))
    return int((math.sqrt(first * first + 2.0 * slope * seconds) - first) / slope)
