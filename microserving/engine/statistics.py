"""What an engine counts and measures about itself, and tells as its load.

Owns: the totals behind ``Counters``, the moving averages and the histograms. Does not know: who reads them. Not
thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from microserving.engine.averages import DecodeTime, Rate
from microserving.engine.jobs import Counters, LoadSnapshot
from microserving.observability.metrics import STEP_BUCKETS, TTFT_BUCKETS, Histogram
from microserving.scheduler import Chunk, Scheduler, SequenceState

_TELLING_TOKENS = 16
"""A step with fewer prompt tokens says nothing of the prefill rate: it takes as long as a decode (a decode engine behind
a prefill engine computes the last token of every prompt)."""
_TELLING_BESIDE_DECODES = 4
"""The same for those that a step has beside decodes, whose time is taken off."""
_LEAST_SHARE = 0.25
"""Of a step with decodes: its prompt tokens count for no less of its time, however long decodes alone took last."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. steps: kind (``decode``, ``prefill``, ``mixed``) -> steps."""

    steps: Mapping[str, Histogram]
    ttft: Histogram
    itl: Histogram


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
        self.finished = dict.fromkeys(("stop", "length", "preempt", "sent", "abort", "deadline", "error"), 0)
        self._prefill = Rate()
        self._stretch = (
            Rate()
        )  # of steps with prompt tokens beside decodes, per what the decodes alone would take
        self._steps_with_decodes = Rate()
        self._decodes_alone = DecodeTime()
        self._steps = {kind: Histogram(STEP_BUCKETS) for kind in ("decode", "prefill", "mixed")}
        self._ttft = Histogram(TTFT_BUCKETS)
        self._itl = Histogram(STEP_BUCKETS)

    def count_step(self, chunks: Sequence[Chunk], seconds: float, whole_s: float) -> None:
        """A step that ran. seconds: of the model, > 0; whole_s: until the engine is ready for the next one, at least
        these. Call it before the scheduler completes the step."""
        prefilled, decodes = 0, 0
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.length
            self.prompt_tokens_computed += max(0, min(end, sequence.prompt_length) - chunk.start)
            self.recomputed_tokens += max(0, min(end, sequence.computed_before) - chunk.start)
            prefilled += 0 if chunk.decode else chunk.length
            decodes += chunk.decode
        beside_s = self._decodes_alone.at(decodes) if decodes else 0.0
        if prefilled >= (_TELLING_BESIDE_DECODES if beside_s else _TELLING_TOKENS):
            self._prefill.observe(prefilled, max(whole_s - beside_s, _LEAST_SHARE * whole_s))
            if beside_s:
                self._stretch.observe(whole_s, beside_s)
        if decodes and not prefilled:
            self._decodes_alone.observe(decodes, whole_s)
        if decodes:
            self._steps_with_decodes.observe(1, whole_s)
        if prefilled or decodes:
            kind = "mixed" if prefilled and decodes else "decode" if decodes else "prefill"
            self._steps[kind].observe(seconds)

    def count_token(self, now: float, before: float | None, arrival: float | None) -> None:
        """A token was sampled ``now``. before: when the request's last one was; arrival: when the request came, for its
        first one (None: that was produced elsewhere)."""
        self.output_tokens += 1
        if before is not None:
            self._itl.observe(now - before)
        elif arrival is not None:
            self._ttft.observe(now - arrival)

    def timings(self) -> Timings:
        """As they are now."""
        steps = {kind: histogram.copy() for kind, histogram in self._steps.items()}
        return Timings(steps, self._ttft.copy(), self._itl.copy())

    def snapshot(self, scheduler: Scheduler) -> LoadSnapshot:
        sequences = list(scheduler.sequences())
        waiting = sum(s.state is SequenceState.WAITING for s in sequences)
        pages, cache = scheduler.pages, scheduler.prefix_cache
        return LoadSnapshot(
            running=len(sequences) - waiting,
            waiting=waiting,
            reserved=scheduler.live_leases,
            leases={state.name.lower(): number for state, number in scheduler.lease_states.items()},
            free_pages=pages.free,
            cached_pages=pages.cached,
            pinned_pages=cache.pinned,
            evictable_pages=cache.evictable,
            running_pages=pages.running,
            reserved_pages=pages.reserved,
            quarantined_pages=pages.quarantined,
            total_pages=pages.total,
            queued_prefill_tokens=sum(s.work_ahead for s in sequences if s.state is not SequenceState.DECODE),
            prefill_tokens_per_s=self._prefill.per_s,
            decode_step_ms=1e3 / self._steps_with_decodes.per_s if self._steps_with_decodes.per_s else 0.0,
            decode_base_ms=self._decodes_alone.base_s * 1e3,
            decode_per_sequence_ms=self._decodes_alone.per_decode_s * 1e3,
            mixed_step_stretch=self._stretch.per_s,
            counters=self._counters(scheduler),
        )

    def _counters(self, scheduler: Scheduler) -> Counters:
        cache = scheduler.prefix_cache
        return Counters(
            prompt_tokens_computed=self.prompt_tokens_computed,
            recomputed_tokens=self.recomputed_tokens,
            output_tokens=self.output_tokens,
            tokens_sent=self.tokens_sent,
            bytes_sent=self.bytes_sent,
            tokens_received=self.tokens_received,
            requests_finished=dict(self.finished),
            aborts=self.aborts,
            preemptions=scheduler.preemptions,
            leases_expired=self.leases_expired,
            prefix_query_tokens=cache.query_tokens,
            prefix_hit_tokens=cache.hit_tokens,
            evicted_pages=cache.evicted_pages,
        )


def prefilled(chunks: Iterable[Chunk]) -> tuple[int, float]:
    """The prompt tokens of a step, and their mean position."""
    tokens, positions = 0, 0.0
    for chunk in chunks:
        if not chunk.decode:
            tokens += chunk.length
            positions += chunk.length * (chunk.start + chunk.length / 2)
    return tokens, positions / max(tokens, 1)
