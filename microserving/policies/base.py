"""What a policy sees of an engine and of the request, and what a policy is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine last said about itself (a part of GET ``/microserving/load``); a few seconds old at most.

    Counts of sequences, pages or tokens as named; all zero until the engine was asked for the first time.
    cached_pages: in the prefix cache, of which pinned_pages are in use now and evictable_pages can be had at once.
    prefill_tokens_per_s (without the time of decodes in the same steps) and decode_step_ms (of a step with decodes) are
    measured, 0.0 while the engine has not worked yet; a step of n decodes alone takes about decode_base_ms + n *
    decode_per_sequence_ms, and one that has prompt tokens, too, mixed_step_stretch times as long.
    """

    running: int = 0
    waiting: int = 0
    reserved: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    pinned_pages: int = 0
    evictable_pages: int = 0
    total_pages: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0
    decode_base_ms: float = 0.0
    decode_per_sequence_ms: float = 0.0
    mixed_step_stretch: float = 0.0

    @property
    def free_memory(self) -> float:
        """Share of the KV pool that a new request could have, 0 to 1. Cached pages that nobody uses count: they can be
        evicted."""
        unused = self.free_pages + max(0, self.cached_pages - self.pinned_pages)
        return unused / self.total_pages if self.total_pages else 0.0


class Candidate(Protocol):
    """An engine that may be chosen."""

    @property
    def id(self) -> str:
        """The engine's node id, for example ``decode-1``."""

    @property
    def in_flight(self) -> int:
        """Requests that this router has on the engine now: exact, live, back to 0 when they have ended."""

    @property
    def load(self) -> EngineLoad:
        """What the engine last said about itself."""


CandidateT = TypeVar("CandidateT", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy may go by, beside the engines.

    turn: how often this policy has been asked before, from 0. Round robin counts with it, the others break ties with
    it, so that equal engines share the work evenly. prompt_length: the request's, in tokens; 0 when there is no
    request. matched: engine id -> how many leading prompt tokens it has in its cache, as far as known. assigned: engine
    id -> prompt tokens that were sent its way since it last told its load, less what it has computed meanwhile.
    """

    turn: int = 0
    prompt_length: int = 0
    matched: Mapping[str, int] = field(default_factory=dict)
    assigned: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """Chooses one of ``engines`` (never empty, always in the same order). A pure function."""

    def __call__(self, engines: Sequence[CandidateT], situation: Situation) -> CandidateT: ...
