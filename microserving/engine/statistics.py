"""What an engine counts and measures about itself, and tells as its load.

Owns: the totals behind ``Counters`` and the two moving averages. Does not know: who reads them. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence

from microserving.engine.jobs import Counters, LoadSnapshot
from microserving.scheduler import Chunk, Scheduler, SequenceState

EWMA_WEIGHT = 0.25
"""Weight of the newest step in a moving average."""


class Statistics:
    def __init__(self) -> None:
        self.prompt_tokens_computed = 0
        self.recomputed_tokens = 0
        self.output_tokens = 0
        self.tokens_sent = 0
        self.bytes_sent = 0
        self.tokens_received = 0
        self.aborts = 0
        self.leases_expired = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.finished = dict.fromkeys(("stop", "length", "sent", "abort", "error"), 0)
        self.prefill_tokens_per_s = 0.0
        self.decode_step_ms = 0.0

    def count_step(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A step that ran. Call it before the scheduler completes the step."""
        prefilled = 0
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.length
            self.prompt_tokens_computed += max(0, min(end, sequence.prompt_length) - chunk.start)
            self.recomputed_tokens += max(0, min(end, sequence.computed_before) - chunk.start)
            prefilled += 0 if chunk.decode else chunk.length
        if prefilled:
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, prefilled / max(seconds, 1e-9))
        if any(chunk.decode for chunk in chunks):
            self.decode_step_ms = _average(self.decode_step_ms, seconds * 1e3)

    def snapshot(self, scheduler: Scheduler) -> LoadSnapshot:
        sequences = list(scheduler.sequences())
        waiting = sum(s.state is SequenceState.WAITING for s in sequences)
        pages = scheduler.pages
        return LoadSnapshot(
            running=len(sequences) - waiting,
            waiting=waiting,
            reserved=scheduler.live_leases,
            free_pages=pages.free,
            cached_pages=pages.cached,
            pinned_pages=0,
            evictable_pages=pages.cached,
            running_pages=pages.running,
            reserved_pages=pages.reserved,
            quarantined_pages=pages.quarantined,
            total_pages=pages.total,
            queued_prefill_tokens=sum(s.remaining for s in sequences if s.state is not SequenceState.DECODE),
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_ms=self.decode_step_ms,
            counters=self._counters(scheduler.preemptions),
        )

    def _counters(self, preemptions: int) -> Counters:
        return Counters(
            prompt_tokens_computed=self.prompt_tokens_computed,
            recomputed_tokens=self.recomputed_tokens,
            output_tokens=self.output_tokens,
            tokens_sent=self.tokens_sent,
            bytes_sent=self.bytes_sent,
            tokens_received=self.tokens_received,
            requests_finished=dict(self.finished),
            aborts=self.aborts,
            preemptions=preemptions,
            leases_expired=self.leases_expired,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            evicted_pages=0,
        )


def _average(average: float, value: float) -> float:
    return value if average == 0.0 else average + EWMA_WEIGHT * (value - average)
