"""What the scheduler tells its caller to run."""

from __future__ import annotations

from dataclasses import dataclass, field

from microserving.scheduler.prefix_cache import PageCopy
from microserving.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute ``sequence.tokens[start : start + length]``.

    last: nothing remains after it (a token may be sampled). decode: the one token of a running decode.
    cached_from: positions [cached_from, start) were found in the prefix cache when the sequence started, with this
    chunk. length is 0 only for a send whose tokens are all cached: nothing is to be computed, only to be put.
    """

    sequence: Sequence
    start: int
    length: int
    last: bool
    decode: bool
    cached_from: int


@dataclass(frozen=True, slots=True)
class Step:
    """``copies`` are made before ``chunks`` run. Falsy when there is nothing to do."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.chunks)
