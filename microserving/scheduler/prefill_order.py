"""Which prompts go on in a step, and how far.

Owns: the order of prefills, and the token budget of one step. Does not know: pages, or how many may run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from microserving.scheduler.sequence import Sequence, SequenceKind, SequenceState
from microserving.scheduler.step import Chunk

AGING_TOKENS_PER_S = 1000.0
"""How many tokens longer a prompt may be that waited one second longer, and still go first. Near a CPU's prefill rate."""


def prefill_order(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Those with tokens to prefill: less work first, but a prompt of n tokens is passed only for n / AGING seconds."""
    pending = (s for s in sequences if s.state in (SequenceState.WAITING, SequenceState.PREFILL))
    return sorted(pending, key=lambda s: (s.work_ahead + AGING_TOKENS_PER_S * s.arrival, s.number))


class PrefillBudget:
    """The prefill chunks that one step may still have. All sends of a step go to one destination.

    chunked: False = a prompt is computed in one chunk, the first of a step even beyond the budget.
    """

    def __init__(self, tokens: int, *, chunked: bool) -> None:
        self._left = tokens
        self._chunked = chunked
        self._used = False
        self._destination: Hashable | None = None

    @property
    def spent(self) -> bool:
        return self._left <= 0

    def accepts(self, sequence: Sequence) -> bool:
        """May the step have a chunk of it?"""
        if sequence.kind is SequenceKind.SEND and self._destination not in (None, sequence.destination):
            return False
        return self._chunked or not self._used or sequence.remaining <= self._left

    def chunk(self, sequence: Sequence, cached_from: int) -> Chunk:
        """The next chunk of an accepted sequence that has its pages."""
        remaining = sequence.remaining
        length = min(self._left, remaining) if self._chunked else remaining
        if sequence.chunk_limit is not None:
            length = min(length, sequence.chunk_limit)
        self._left -= length
        self._used = self._used or length > 0
        if sequence.kind is SequenceKind.SEND:
            self._destination = sequence.destination
        return Chunk(
            sequence,
            sequence.computed,
            length,
            last=length == remaining,
            decode=False,
            cached_from=cached_from,
        )
