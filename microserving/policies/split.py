"""Where to split a prompt between a prefill and a decode engine: what ``auto`` chooses.

A share of each prompt is moved to the decode engine, and about the same share of all: what counts is less how long the
queues are at this moment, since they are others when the decode engine comes to its part, than what the engines have to do
in the mean. So the two are seen as queues, and the share is one at which a request takes about the least time in the mean, from
its arrival to its last token. Seconds throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from microserving.policies.base import EngineLoad
from microserving.policies.demand import Demand

MOSTLY_CACHED = 0.9
"""From this share of a prompt on, handing the rest over to another engine costs more than it saves."""
SHARES = 40
"""How many shares above 0 are tried."""
HORIZON = 64
"""So many requests are looked ahead: a queue that grows without end is as long as it is then."""
STRETCH = 2.5
"""Prompt tokens make a step with outputs so many times longer (an engine's default ``max_itl_ratio``), as long as an engine
has not told."""
LEAST_STRETCH = 1.2
"""Told less than that counts as that: prompt tokens have some part of every step."""
MOST_STRETCH = 10.0
"""Told more than that counts as that: one stalled step does not stand for all."""
MOST_OUTPUTS = 32
"""At a time, on one engine."""
NO_MATTER = 0.02
"""Of the least mean time: what a smaller share may cost. It leaves the outputs on the decode engine alone, and engines that
have not worked hard yet tell a better pace than they have under load."""
LEAST_RATE = 1e-3
"""Tokens/s. What an engine tells below it counts as unknown."""


def is_mostly_cached(tokens: int, matched: int) -> bool:
    """So that the prefill engine is not worth its while."""
    return matched >= MOSTLY_CACHED * tokens


def balanced_end(
    tokens: int,
    matched: int,
    prefill: EngineLoad,
    decode: EngineLoad,
    for_prefill: Demand,
    for_decode: Demand,
) -> int:
    """Where to split a prompt so that requests take about the least time in the mean (``mean_s``).

    tokens: the prompt's length, >= 1. matched: how many leading ones the decode engine has cached. for_prefill, for_decode:
    what comes for them, this prompt included.

    A prefill rate that is not known counts as the other one; with neither the prefill engine takes all it can.
    Returns: end, in [0, tokens - 1], and never below ``matched`` but for the last token. ``end <= matched``: the prefill
    engine is not needed; so also when it would have next to nothing to do (``MOSTLY_CACHED``).
    """
    last = tokens - 1
    matched = min(matched, last)
    if is_mostly_cached(tokens, matched):
        return matched
    p, d = (load.prefill_tokens_per_s for load in (prefill, decode))
    p, d = p if p >= LEAST_RATE else 0.0, d if d >= LEAST_RATE else 0.0
    if not p and not d:
        return last
    base_ms, more_ms = decode.decode_base_ms, decode.decode_per_sequence_ms
    if not base_ms and not more_ms:
        base_ms = decode.decode_step_ms
    stretch = decode.mixed_step_stretch
    stretch = min(max(stretch, LEAST_STRETCH), MOST_STRETCH) if stretch else STRETCH
    pair = Pair(p or d, d or p, stretch, base_ms / 1000, more_ms / 1000, for_prefill, for_decode)
    end = min(last, tokens - round(best_share(pair) * (tokens - matched)))
    return matched if is_mostly_cached(tokens, tokens - (end - matched)) else end


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill rates in tokens/s, > 0, without the time of outputs in the same steps; how many times longer prompt tokens make
    such a step, > 1; seconds of a step of the decode engine's outputs alone, and what each output adds to them; what comes
    for the two."""

    prefill_rate: float
    decode_rate: float
    stretch: float
    step_s: float
    output_step_s: float
    prefill: Demand
    decode: Demand


def best_share(pair: Pair) -> float:
    """The least share with which requests take about the least time (``NO_MATTER``)."""
    times = [mean_s(pair, step / SHARES) for step in range(SHARES + 1)]
    most = (1.0 + NO_MATTER) * min(times)
    good = (step for step, time in enumerate(times) if time <= most)
    return next(good, 0) / SHARES  # none: with numbers at the ends of what a float holds a time may be nan


def mean_s(pair: Pair, share: float) -> float:
    """The mean time of a request when the decode engine computes this share of every prompt.

    The prefill engine's queue and its part ``s = (1 - share) * tokens / prefill_rate``; the decode engine's queue and its
    part, which takes ``1 + b / (stretch - 1)`` times longer than alone, as outputs run beside it for the share ``b`` of the
    time; and the output, which the parts of others make ``1 / (1 - u)`` times longer, at most ``stretch`` times, with ``u`` the
    decode engine's use by them, in steps that are as long as it and ``rate * output_s`` others (Little) make them, but no
    more than MOST_OUTPUTS. Behind a prefill engine with too much to do, requests come no faster than it lets them.
    """
    first, second = pair.prefill, pair.decode
    part_s = (1.0 - share) * first.tokens / pair.prefill_rate
    moved_s = share * first.tokens / pair.decode_rate
    others_s = share * second.tokens / pair.decode_rate
    coming = second.rate / max(1.0, first.rate * part_s)
    use = coming * others_s
    longer = min(pair.stretch, 1.0 / (1.0 - use)) if use < 1.0 else pair.stretch
    steps = second.output_tokens * longer
    alone = 1.0 - steps * pair.output_step_s * coming
    most_s = steps * (pair.step_s + MOST_OUTPUTS * pair.output_step_s)
    one_s = steps * (pair.step_s + pair.output_step_s)
    output_s = min(most_s, one_s / alone) if alone > 0.0 else most_s
    beside = min(1.0, coming * output_s)
    slower = 1.0 + beside / (pair.stretch - 1.0)
    wait = wait_s(first.rate, part_s, first.variation) + wait_s(coming, others_s * slower, second.variation)
    return wait + part_s + moved_s * slower + output_s


def wait_s(rate: float, service_s: float, variation: float) -> float:
    """The mean wait in a queue with Poisson arrivals, ``rate`` a second, over the next HORIZON of them.

    Of Pollaczek and Khinchine while the server's use is well below 1, half of what the queue has grown to where it is
    above, and smooth between: the coordinate transformation of Kimber and Hollis (1979), as in Akcelik's delay formula.
    """
    if rate <= 0.0:
        return 0.0
    horizon_s = HORIZON / rate
    above, k = rate * service_s - 1.0, (1.0 + variation) / 2.0
    return (
        horizon_s
        / 4.0
        * (above + math.sqrt(above * above + 8.0 * k * rate * service_s * service_s / horizon_s))
    )
