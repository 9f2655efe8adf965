"""What goes into an engine and comes out of it besides generations: sends, reservations, load.

Pure data. Who makes descriptors or HTTP answers of it is elsewhere (``engine/handoff.py``, ``server``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from microserving.engine.runner import LayerTimes
from microserving.transports.base import LeaseGuard, RemotePool


@dataclass(frozen=True, slots=True)
class SendJob:
    """Compute ``prompt_token_ids[:end]`` and put the K/V of positions [begin, end) into another engine's pool.

    slots: int32 [end - begin], the receiver's slot of each position. destination names the receiver (engine id and
    epoch); the sends of one step share one ``pool`` object. The receiver granted the write before the job is submitted;
    guard: what it granted. cache_salt: as in ``GenerationRequest``.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    begin: int
    end: int
    pool: RemotePool
    destination: str
    slots: npt.NDArray[np.int32]
    guard: LeaseGuard
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One run of the model for a send, or one put of what was cached, in CLOCK_MONOTONIC nanoseconds.

    layers: None when nothing was put (only positions below ``begin``).
    """

    begin_ns: int
    end_ns: int
    layers: LayerTimes | None


@dataclass(frozen=True, slots=True)
class SendDone:
    """A send whose puts have all happened (the receiver does not know it yet).

    tokens_computed counts a position again when it was recomputed after a preemption; prefix_matched_length: how many of
    the prompt's tokens were cached when the send first started. tokens_sent is exactly ``end - begin`` and bytes_sent
    its K/V over all layers. ``steps`` is empty when there was nothing to do.
    """

    tokens_computed: int
    prefix_matched_length: int
    tokens_sent: int
    bytes_sent: int
    steps: tuple[StepTimes, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages reserved for the K/V of ``prompt_token_ids[:end]``; the writer fills positions [prefix_matched_length, end).

    slots: int32 [end - prefix_matched_length], this engine's slot (page * page_size + offset) of each position to be
    written. lease_ttl_s: seconds from now until the lease expires unless it is renewed or written to.
    """

    request_id: str
    lease_id: int
    prompt_token_ids: tuple[int, ...]
    prefix_matched_length: int
    end: int
    slots: npt.NDArray[np.int32]
    lease_ttl_s: float

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the engine started; they only grow.

    prompt_tokens_computed: prompt positions computed here, once per computation; recomputed_tokens: those of them
    (and of output positions) that a preemption made this engine compute again. output_tokens: tokens sampled.
    requests_finished: ending -> requests; the endings are ``stop``, ``length``, ``preempt`` (given back), ``sent``,
    ``abort``, ``deadline`` and ``error``.
    prefix_query_tokens: tokens looked up in the prefix cache; prefix_hit_tokens: those of them that were found.
    """

    prompt_tokens_computed: int
    recomputed_tokens: int
    output_tokens: int
    tokens_sent: int
    bytes_sent: int
    tokens_received: int
    requests_finished: Mapping[str, int]
    aborts: int
    preemptions: int
    leases_expired: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    evicted_pages: int


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """What the engine is doing now. ``free + cached + running + reserved + quarantined == total`` pages, always.

    cached_pages: ``pinned`` (in use, too) plus ``evictable`` (at once). running, waiting: sequences (generations and
    sends). reserved: live leases; leases: their state (``issued``, ``writing``, ``arrived``) -> number.
    queued_prefill_tokens: still to be computed, without what the cache was seen to have. prefill_tokens_per_s (without the
    time of decodes beside them) and decode_step_ms (of a step with decodes, whatever is beside them): averages over the
    last steps; a step of n decodes alone takes about decode_base_ms + n * decode_per_sequence_ms, and one that has prompt
    tokens, too, mixed_step_stretch times as long. All of these have what passes between steps, and are 0.0 while there
    were none.
    """

    running: int
    waiting: int
    reserved: int
    leases: Mapping[str, int]
    free_pages: int
    cached_pages: int
    pinned_pages: int
    evictable_pages: int
    running_pages: int
    reserved_pages: int
    quarantined_pages: int
    total_pages: int
    queued_prefill_tokens: int
    prefill_tokens_per_s: float
    decode_step_ms: float
    decode_base_ms: float
    decode_per_sequence_ms: float
    mixed_step_stretch: float
    counters: Counters
