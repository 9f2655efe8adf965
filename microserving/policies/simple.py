"""The policies that need nothing but the candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from microserving.policies.base import CandidateT, Situation

Cost = tuple[float, ...]
_UINT64 = 2**64 - 1


def round_robin(engines: Sequence[CandidateT], situation: Situation) -> CandidateT:
    """One after the other, in the stable order of the pool."""
    return engines[situation.turn % len(engines)]


def least_loaded(engines: Sequence[CandidateT], situation: Situation) -> CandidateT:
    """The engine with the fewest requests of this router in flight."""
    return cheapest(engines, situation, lambda engine: (engine.in_flight,))


def most_free_memory(engines: Sequence[CandidateT], situation: Situation) -> CandidateT:
    """The engine with the largest free share of its KV pool; of equal ones, the one with fewer requests in flight."""
    return cheapest(engines, situation, lambda engine: (-engine.load.free_memory, engine.in_flight))


def power_of_two(engines: Sequence[CandidateT], situation: Situation) -> CandidateT:
    """The less loaded of two engines drawn at random, which spreads bursts well when loads are a little old.

    The draw is a function of the turn alone, so that a run can be repeated.
    """
    count = len(engines)
    if count < 3:
        return least_loaded(engines, situation)
    drawn = _mixed(situation.turn)
    first = drawn % count
    second = (first + 1 + (drawn >> 32) % (count - 1)) % count  # any other one
    return min(engines[first], engines[second], key=lambda engine: engine.in_flight)


def cheapest(
    engines: Sequence[CandidateT], situation: Situation, cost: Callable[[CandidateT], Cost]
) -> CandidateT:
    """The engine of least cost. Ties go to the first one from position ``turn`` on, wrapping around."""
    first = situation.turn % len(engines)
    return min([*engines[first:], *engines[:first]], key=cost)


def _mixed(value: int) -> int:
    """The ``value``-th output of SplitMix64 (Steele et al. 2014): 64 bits that look random."""
    z = (value + 1) * 0x9E3779B97F4A7C15 & _UINT64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _UINT64
    return z ^ (z >> 31)
