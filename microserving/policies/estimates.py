"""When an engine would be done, from what it last said of itself, and what follows from that.

All estimates are in seconds from now, and rough: they compare engines, they promise nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from microserving.policies.base import CandidateT, EngineLoad, Situation
from microserving.policies.simple import cheapest

LONG_PROMPT_TOKENS = 512
"""From here on the prompt's own computation outweighs some steps of decoding."""
MOSTLY_CACHED = 0.9
"""From this share of a prompt on, handing the rest over to another engine costs more than it saves."""
_NOMINAL_OUTPUT_TOKENS = 64


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
        decode = 0.0 if is_long else _NOMINAL_OUTPUT_TOKENS * engine.load.decode_step_ms / 1000
        return prefill + decode, engine.in_flight

    return cheapest(engines, situation, cost)


def prefill_finish_s(load: EngineLoad, tokens: int, *, default_rate: float) -> float:
    """When an engine has computed all that is queued and ``tokens`` more. default_rate: tokens/s of an engine that has
    not measured its own yet; > 0."""
    return (load.queued_prefill_tokens + tokens) / (load.prefill_tokens_per_s or default_rate)


def fastest_rate(loads: Iterable[EngineLoad]) -> float:
    """The highest measured prefill rate in tokens/s; 1.0 when nobody has measured one."""
    return max((load.prefill_tokens_per_s for load in loads), default=0.0) or 1.0


def balanced_end(tokens: int, matched: int, prefill: EngineLoad, decode: EngineLoad) -> int:
    """Where to split a prompt so that the prefill and the decode engine are done with all they have at the same time.

    tokens: the prompt's length, >= 1. matched: how many leading ones the decode engine has cached. The prefill engine
    computes ``[matched, end)`` behind its queue P, the decode engine ``[end, tokens)`` behind its queue D, at rates p and
    d; the two are done together when ``(P + end - matched) / p == (D + tokens - end) / d``. A rate that is not known
    counts as the other one; with neither the prefill engine takes all it can.
    Returns: end, in [0, tokens - 1], and never below ``matched`` but for the last token. ``end <= matched``: the prefill
    engine is not needed; also when most of the prompt is cached (``MOSTLY_CACHED``).
    """
    last = tokens - 1
    matched = min(matched, last)
    if matched >= MOSTLY_CACHED * tokens:
        return matched
    p, d = prefill.prefill_tokens_per_s, decode.prefill_tokens_per_s
    if not p and not d:
        return last
    p, d = p or d, d or p
    done_together = (
        p * (decode.queued_prefill_tokens + tokens) - d * (prefill.queued_prefill_tokens - matched)
    ) / (p + d)
    return max(matched, min(int(done_together), last))
