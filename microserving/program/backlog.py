"""What a router knows of its engines' work beyond what they told last: what it sent them since, and what came of late."""

from __future__ import annotations

import time
from collections.abc import Callable

from microserving.policies import Arrivals, Demand, EngineLoad
from microserving.program.engine_client import EngineClient


class Backlog:
    """Prompt tokens that each engine has still to compute: what it told last, what was sent its way since, and less what
    it computes meanwhile at the rate that it told. So a burst between two looks at the load is spread. And the prompts
    that came for each of late.

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, tuple[EngineLoad, float, float]] = {}  # load, tokens, when that was
        self._for_prefill: dict[str, Arrivals] = {}
        self._for_decode: dict[str, Arrivals] = {}

    def add(self, engine: EngineClient, tokens: int) -> None:
        self._known[engine.id] = (engine.load, self.tokens(engine) + tokens, self._clock())

    def tokens(self, engine: EngineClient) -> float:
        load, tokens, since = self._known.get(engine.id, (None, 0.0, 0.0))
        if load is not engine.load:
            return engine.load.queued_prefill_tokens
        return max(0.0, tokens - load.prefill_tokens_per_s * (self._clock() - since))

    def arrived(self, prefill: EngineClient, decode: EngineClient, tokens: int, output_tokens: int) -> None:
        """A prompt has come for the two. tokens: of it, those that they may share; 0 = the prefill engine is not needed.
        output_tokens: it wants at most so many."""
        now = self._clock()
        self._for_decode.setdefault(decode.id, Arrivals()).add(now, tokens, output_tokens)
        if tokens:
            self._for_prefill.setdefault(prefill.id, Arrivals()).add(now, tokens, output_tokens)

    def demand(self, prefill: EngineClient, decode: EngineClient) -> tuple[Demand, Demand]:
        """What comes for the two. What waits for the prefill engine will come to the decode engine, as from the others."""
        now, rate = self._clock(), prefill.load.prefill_tokens_per_s or decode.load.prefill_tokens_per_s
        for_prefill = self._for_prefill.get(prefill.id, Arrivals())
        for_decode = self._for_decode.get(decode.id, Arrivals())
        waiting = self.tokens(prefill) / max(1.0, for_prefill.tokens)
        return for_prefill.demand(now, rate, waiting), for_decode.demand(now, rate, waiting)

    def forget(self, engine_id: str) -> None:
        """The engine is gone."""
        for known in (self._known, self._for_prefill, self._for_decode):
            known.pop(engine_id, None)
