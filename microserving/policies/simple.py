"""The policies that need nothing but the candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from microserving.policies.base import CandidateT


def round_robin(engines: Sequence[CandidateT], turn: int) -> CandidateT:
    """One after the other, in the stable order of the pool."""
    return engines[turn % len(engines)]


def least_loaded(engines: Sequence[CandidateT], turn: int) -> CandidateT:
    """The engine with the fewest requests of this router in flight."""
    return _lowest(engines, turn, lambda engine: engine.in_flight)


def most_free_memory(engines: Sequence[CandidateT], turn: int) -> CandidateT:
    """The engine with the largest free share of its KV pool; of equal ones, the one with fewer requests in flight."""
    return _lowest(engines, turn, lambda engine: (-engine.load.free_memory, engine.in_flight))


def _lowest(
    engines: Sequence[CandidateT], turn: int, cost: Callable[[CandidateT], int | tuple[float, int]]
) -> CandidateT:
    """The engine of least cost. Ties go to the first one from position ``turn`` on, wrapping around."""
    first = turn % len(engines)
    return min([*engines[first:], *engines[:first]], key=cost)
