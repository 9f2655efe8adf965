"""When an engine would be done, from what it last said of itself, and what follows from that.

All estimates are in seconds from now, and rough: they compare engines, they promise nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from microserving.policies.base import CandidateT, EngineLoad, Situation
from microserving.policies.simple import cheapest

LONG_PROMPT_TOKENS = 512
"""From here on the prompt's own computation outweighs some steps of decoding."""
MOSTLY_CACHED = 0.9
"""From this share of a prompt on, handing the rest over to another engine costs more than it saves."""
NOMINAL_OUTPUT_TOKENS = 64
"""Of a request that does not say how many it wants."""
MAX_OUTPUT_TOKENS = 256
"""Few outputs are as long as a larger bound allows."""


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


def decoding_s(load: EngineLoad, requests: int, output_tokens: int = NOMINAL_OUTPUT_TOKENS) -> float:
    """How long an engine goes on decoding for the ``requests`` that are on it, each somewhere in an output of
    ``output_tokens``: they share the steps, so the longest rest counts, which of n uniform ones is n / (n + 1)."""
    steps = min(output_tokens, MAX_OUTPUT_TOKENS) * requests / (requests + 1)
    return steps * load.decode_step_ms / 1000


def balanced_end(
    tokens: int,
    matched: int,
    prefill: EngineLoad,
    decode: EngineLoad,
    *,
    queued: tuple[float, float] | None = None,
    decoding: float = 0.0,
    outputs: float = 0.0,
    coming: float | None = None,
) -> int:
    """Where to split a prompt between a prefill and a decode engine, so that requests take the least time in the mean.

    tokens: the prompt's length, >= 1. matched: how many leading ones the decode engine has cached. queued: prompt tokens
    before the two engines, when more is known than they told. decoding: seconds of decoding before the decode engine
    (``decoding_s``). outputs: how many it decodes now. coming: requests a second that the prefill engine gets; None =
    enough to keep it busy.

    Two engines are balanced when both are done with all they have at the same time: the prefill engine computes
    ``[matched, end)`` behind its queue P, the decode engine ``[end, tokens)`` behind its queue D and its decoding t, at
    rates p and e: ``(P + end - matched) / p == t + (D + tokens - end) / e``. (That the second part waits for the first one
    changes nothing: what counts is that no engine idles while the other one has a queue.)

    Who gains by a token that the prefill engine is spared are the ``F = coming * (P + tokens - matched) / p`` requests that
    come while it is busy with what it has now: each waits ``1 / p`` less. On the decode engine the token costs ``(1 +
    outputs + 1/2) / d - 1 / p``: the request itself, the outputs that it holds up, and half an output more, since another
    one may begin meanwhile. The quotient of the two, at most 1, is the share of the balance that is worth it: a prefill
    engine that nobody waits for does all it can. And ``e = d / (1 + outputs / max(1, F))``: the more requests wait, the less
    do the outputs count.

    A rate that is not known counts as the other one; with neither the prefill engine takes all it can.
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
    before_p, before_d = queued or (prefill.queued_prefill_tokens, decode.queued_prefill_tokens)
    followers = math.inf if coming is None else coming * (before_p + tokens - matched) / p
    e = d / (1.0 + outputs / max(1.0, followers))
    done_together = (p * (before_d + e * decoding + tokens) - e * (before_p - matched)) / (p + e)
    most = last - max(matched, min(int(done_together), last))
    cost = (1.5 + outputs) * p - d
    return last - int(most * (min(1.0, followers * d / cost) if cost > 0.0 else 1.0))
