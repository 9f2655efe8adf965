"""One sequence of tokens on its way through the engine.

Owns: the fields and what follows from them. Does not know: when a sequence runs, or what becomes of its tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from microserving.scheduler.prefix_cache import PrefixHandle


class SequenceKind(Enum):
    """generate: prefill, then decode. send: prefill only, every K/V row also goes to ``destination``."""

    GENERATE = "generate"
    SEND = "send"


class SequenceState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Fields grouped by who writes them.

    Positions [0, computed) have their K/V in ``pages``; position p lies in ``pages[p // page_size]``. The first of the
    pages are shared and belong to the prefix cache; ``handle`` pins them.
    """

    # The maker. ``tokens``: the prompt (of a send, its computed part), then the output as it comes. A generation that is
    # resumed begins with some output already: then ``prompt_length`` is given. deadline: by the clock of ``arrival``.
    # shares_prefix: False = it computes every token itself. chunk_limit: the most tokens of it in one step's prefill.
    request_id: str
    kind: SequenceKind
    tokens: list[int]
    arrival: float
    destination: Hashable = None
    salt: str = ""
    deadline: float | None = None
    prompt_length: int = -1  # -1: all of ``tokens``
    shares_prefix: bool = True
    chunk_limit: int | None = None

    # The scheduler.
    number: int = -1  # order of arrival, unique
    state: SequenceState = SequenceState.WAITING
    pages: list[int] = field(default_factory=list)
    handle: PrefixHandle | None = None
    computed: int = 0
    computed_before: int = (
        0  # positions below this were computed (or received) here once, before a preemption
    )
    expected_cached: int = (
        0  # of a sequence that waits: how many tokens the cache had when it was last looked at
    )
    cached_tokens: int = 0  # found in the prefix cache when it first started, or when its pages were reserved
    started: bool = False
    publishes: bool = True  # False: what it computed may be wrong, nobody shall share it

    def __post_init__(self) -> None:
        if self.prompt_length < 0:
            self.prompt_length = len(self.tokens)

    @property
    def key(self) -> tuple[SequenceKind, str]:
        """Unique among live sequences: a request may be sent from and generated on the same engine."""
        return (self.kind, self.request_id)

    @property
    def remaining(self) -> int:
        """Tokens whose K/V is still to be computed; 1 in a decode."""
        return len(self.tokens) - self.computed

    @property
    def work_ahead(self) -> int:
        """Tokens that will have to be computed, as far as it can be foreseen."""
        return len(self.tokens) - max(self.computed, self.expected_cached)

    def is_late(self, now: float) -> bool:
        """Has its deadline come?"""
        return self.deadline is not None and self.deadline <= now
