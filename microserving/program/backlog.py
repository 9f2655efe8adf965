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
        self._arrivals: dict[str, Arrivals] = {}

    def add(self, engine: EngineClient, tokens: int) -> None:
        self._known[engine.id] = (engine.load, self.tokens(engine) + tokens, self._clock())

    def tokens(self, engine: EngineClient) -> float:
        load, tokens, since = self._known.get(engine.id, (None, 0.0, 0.0))
        if load is not engine.load:
            return engine.load.queued_prefill_tokens
        return max(0.0, tokens - load.prefill_tokens_per_s * (self._clock() - since))

    def arrived(self, engine: EngineClient, tokens: int, output_tokens: int) -> None:
        """A prompt has come for ``engine``. tokens: those that are to be computed, by this engine or another one."""
        self._arrivals.setdefault(engine.id, Arrivals()).add(self._clock(), tokens, output_tokens)

    def demand(self, prefill: EngineClient, decode: EngineClient) -> tuple[Demand, Demand]:
        """What comes for the two. What waits for the prefill engine will come to the decode engine."""
        rate = prefill.load.prefill_tokens_per_s or decode.load.prefill_tokens_per_s
        before = self.tokens(prefill)
        return (
            self._demand(prefill, rate, before),
            self._demand(decode, rate, before + self.tokens(decode)),
        )

    def _demand(self, engine: EngineClient, prefill_rate: float, waiting_tokens: float) -> Demand:
        arrivals = self._arrivals.get(engine.id)
        return Demand() if arrivals is None else arrivals.demand(self._clock(), prefill_rate, waiting_tokens)

    def forget(self, engine_id: str) -> None:
        """The engine is gone."""
        self._known.pop(engine_id, None)
        self._arrivals.pop(engine_id, None)
