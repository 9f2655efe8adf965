"""Which engine has a prompt's prefix in its cache, weighed against what else it has to do."""

from __future__ import annotations

from collections.abc import Sequence

from microserving.policies.base import CandidateT, Situation
from microserving.policies.simple import cheapest

_SLACK = 2
"""At light traffic an engine may be so many requests busier than the idlest one before a whole cached prompt is not worth
the wait any more."""


def prefix_aware(engines: Sequence[CandidateT], situation: Situation) -> CandidateT:
    """The engine with the best (matched share of the prompt) - (relative load).

    Relative load: requests in flight above those of the idlest engine, over the mean. So a hit counts at most as much
    as the mean load (or ``_SLACK`` requests): a prefix that everybody asks for is soon on several engines, and without
    any hit the least loaded engine is chosen.
    """
    in_flight = [engine.in_flight for engine in engines]
    idlest, mean = min(in_flight), max(_SLACK, sum(in_flight) / len(engines))
    length = max(1, situation.prompt_length)

    def cost(engine: CandidateT) -> tuple[float, float]:
        hit = min(situation.matched.get(engine.id, 0), length) / length
        return (engine.in_flight - idlest) / mean - hit, engine.in_flight

    return cheapest(engines, situation, cost)
