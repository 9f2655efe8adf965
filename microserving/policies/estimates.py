"""When an engine would be done, from what it last said of itself, and what follows from that.

All estimates are in seconds from now, and rough: they compare engines, they promise nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from microserving.policies.base import CandidateT, EngineLoad, Situation
from microserving.policies.simple import cheapest

LONG_PROMPT_TOKENS = 512
"""From here on the prompt's own computation outweighs some steps of decoding."""
NOMINAL_OUTPUT_TOKENS = 64
"""Of a request that does not say how many it wants."""


def prompt_length(engines: Sequence[CandidateT], situation: Situation) -> CandidateT:
    """A long prompt goes to compute headroom, a short one to the engine that finishes it soonest.

    Headroom: the earliest end of the prefill, by measured prefill rate and queued tokens. Finish: that, and some tokens
    of output at the engine's present step time. An engine that has not worked yet counts as fast as the fastest one.
    """
    rate = fastest_rate(engine.load for engine in engines)
    is_long = situation.prompt_length >= LONG_PROMPT_TOKENS

    def cost(engine: CandidateT) -> tuple[float, float]:
        queued = situation.assigned.get(engine.id, 0) + situation.prompt_length
        prefill = prefill_finish_s(engine.load, queued, default_rate=rate)
        decode = 0.0 if is_long else NOMINAL_OUTPUT_TOKENS * engine.load.decode_step_ms / 1000
        return prefill + decode, engine.in_flight

    return cheapest(engines, situation, cost)


def prefill_finish_s(load: EngineLoad, tokens: float, *, default_rate: float) -> float:
    """When an engine has computed all that is queued and ``tokens`` more. default_rate: tokens/s of an engine that has
    not measured its own yet; > 0."""
    return (load.queued_prefill_tokens + tokens) / (load.prefill_tokens_per_s or default_rate)


def fastest_rate(loads: Iterable[EngineLoad]) -> float:
    """The highest measured prefill rate in tokens/s; 1.0 when nobody has measured one."""
    return max((load.prefill_tokens_per_s for load in loads), default=0.0) or 1.0
