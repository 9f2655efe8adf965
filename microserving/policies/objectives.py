"""When latency objectives call for another division of the engines, with hysteresis.

Pure: sees measured latencies once a round and says what to shift. Does not know engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Shift = Literal["prefill", "decode"]
"""Which side needs more engines."""


@dataclass(slots=True)
class ObjectiveWatch:
    """Asks for more prefill when the time to the first token (TTFT) is missed, for more decode when the time between
    tokens (ITL) is.

    ttft_s, itl_s: the objectives in seconds. patience: rounds in a row that must ask for the same shift, and rounds of
    rest after one, in which its effect can be seen. margin: a side gives an engine away only while its own latency is
    below this share of its objective, so that the two do not take turns. When both miss, engines are lacking and no
    shift helps.
    """

    ttft_s: float
    itl_s: float
    patience: int = 2
    margin: float = 0.8
    _wanted: Shift | None = field(default=None, init=False)
    _rounds: int = field(default=0, init=False)
    _rest: int = field(default=0, init=False)

    def decide(self, ttft_s: float | None, itl_s: float | None) -> Shift | None:
        """One round. ttft_s, itl_s: measured; None when nothing was measured of late, which counts as no load."""
        wanted = self._wish(ttft_s or 0.0, itl_s or 0.0)
        if self._rest > 0:
            self._rest -= 1
            return None
        self._rounds = self._rounds + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if wanted is None or self._rounds < self.patience:
            return None
        self._rounds, self._wanted, self._rest = 0, None, self.patience
        return wanted

    def _wish(self, ttft_s: float, itl_s: float) -> Shift | None:
        if ttft_s > self.ttft_s and itl_s < self.margin * self.itl_s:
            return "prefill"
        if itl_s > self.itl_s and ttft_s < self.margin * self.ttft_s:
            return "decode"
        return None
