"""Which of the live sequences run in the next step, and who loses its pages for that.

Owns: the rules of starting, growing and preempting, and the claim of the first sequence that found no pages. Does not
know: how sequences come and end, leases, which prompt goes first (``prefill_order``), where pages come from (``PagePool``).
"""

from __future__ import annotations

from microserving.scheduler.config import SchedulerConfig
from microserving.scheduler.page_allocator import PageState
from microserving.scheduler.page_pool import Grant, PagePool
from microserving.scheduler.prefill_order import PrefillBudget, prefill_order
from microserving.scheduler.sequence import Sequence, SequenceKind, SequenceState
from microserving.scheduler.step import Chunk, Step

Sequences = dict[tuple[SequenceKind, str], Sequence]


class BatchBuilder:
    """sequences: the live ones in order of arrival, the scheduler's own mapping.

    pages_wanted: by the first sequence that found no pages in the last ``build``; nobody takes pages before it.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool, sequences: Sequences) -> None:
        self.pages_wanted = 0
        self.preemptions = 0
        self._config = config
        self._pool = pool
        self._sequences = sequences

    def build(self, now: float, prefill_budget: int | None) -> Step:
        """A step of all that can run; if that is nothing, the newest holders are preempted until something can."""
        step = self._build(now, prefill_budget)
        while not step and self._preempt_newest_holder():
            step = self._build(now, prefill_budget)
        return step

    def in_state(self, *states: SequenceState) -> int:
        """How many sequences are."""
        return sum(s.state in states for s in self._sequences.values())

    @property
    def running(self) -> int:
        return self.in_state(SequenceState.PREFILL, SequenceState.DECODE)

    def spare(self, *, idle: bool) -> int:
        """Pages that a start must leave to others: one to each decode, and while others run what the threshold says."""
        headroom = self.in_state(SequenceState.DECODE)
        return headroom if idle else max(headroom, self._config.kept_back)

    # --- one step --------------------------------------------------------------------------------------------

    def _build(self, now: float, prefill_budget: int | None) -> Step:
        decodes = self._decodes_with_pages()
        step = Step([Chunk(s, s.computed, 1, True, True, s.computed) for s in decodes])
        budget = self._budget(prefill_budget if decodes else None)
        if not budget.spent:  # else nobody is looked at, and who wanted pages still does
            self.pages_wanted = 0
        for sequence in prefill_order(self._sequences.values()):
            if budget.spent:
                break
            if not budget.accepts(sequence):
                continue
            cached_from = sequence.computed
            if sequence.state is SequenceState.WAITING:
                grant = None if sequence.is_late(now) else self._start(sequence)
                if grant is None:
                    continue
                step.copies.extend(grant.copies)
            step.chunks.append(budget.chunk(sequence, cached_from))
        return step

    def _budget(self, prefill_budget: int | None) -> PrefillBudget:
        tokens = self._config.chunk_size_tokens
        if prefill_budget is not None:
            tokens = min(tokens, prefill_budget)
        return PrefillBudget(tokens, chunked=self._config.chunked_prefill_enabled)

    def _decodes_with_pages(self) -> list[Sequence]:
        """The decodes that have a page for their next token, oldest first; may preempt newer sequences."""
        ready: list[Sequence] = []
        for sequence in self._sequences.values():
            if sequence.state is SequenceState.DECODE and self._grow(sequence):
                ready.append(sequence)
        return ready

    def _grow(self, sequence: Sequence) -> bool:
        """One more page if the next token needs it: one that is available, or the newest newer sequences'."""
        while self._pool.available < self._pool.missing(sequence, len(sequence.tokens)):
            victim = self._newest_holder()
            if victim is None or victim is sequence:
                return False
            self._preempt(victim)
        self._pool.grow(sequence, len(sequence.tokens))
        return True

    # --- starting --------------------------------------------------------------------------------------------

    def _start(self, sequence: Sequence) -> Grant | None:
        """Let a waiting sequence run, with the pages of all its tokens."""
        if self._is_full(sequence) or (self.pages_wanted and sequence.handle is None):
            return None
        grant = self._open(sequence) if sequence.handle is None else self._grow_received(sequence)
        if grant is None:
            self.pages_wanted = self.pages_wanted or self._pool.missing(sequence, len(sequence.tokens))
            return None
        sequence.computed, sequence.expected_cached = grant.matched, 0
        sequence.state = SequenceState.PREFILL
        return grant

    def _is_full(self, sequence: Sequence) -> bool:
        """Who holds what it received waits for no other prompt: its pages are of no use to anybody meanwhile."""
        limit = self._config.max_concurrent_prefills
        if limit is not None and sequence.handle is None and self.in_state(SequenceState.PREFILL) >= limit:
            return True
        return self.running >= self._config.max_batch_size

    def _open(self, sequence: Sequence) -> Grant | None:
        tokens = len(sequence.tokens)
        # A generation computes its last token in any case, for its logits.
        wanted = tokens if sequence.kind is SequenceKind.SEND else tokens - 1
        grant = self._pool.open(
            sequence,
            PageState.RUNNING,
            sequence.tokens[:wanted] if sequence.shares_prefix else (),
            tokens,
            shared_limit=wanted,
            spare=self.spare(idle=not self.running),
        )
        if grant is not None and not sequence.started:
            sequence.started = True
            sequence.cached_tokens = grant.matched
            if sequence.shares_prefix:
                self._pool.cache.count(wanted, grant.matched)
        return grant

    def _grow_received(self, sequence: Sequence) -> Grant | None:
        """It holds what it received, which is of no use to anybody else: only the running decodes go before it."""
        missing = self._pool.missing(sequence, len(sequence.tokens))
        if missing > 0 and self._pool.available < missing + self.in_state(SequenceState.DECODE):
            return None
        self._pool.grow(sequence, len(sequence.tokens))
        return Grant(sequence.computed, [])

    # --- preempting ------------------------------------------------------------------------------------------

    def _newest_holder(self) -> Sequence | None:
        return next((s for s in reversed(self._sequences.values()) if s.pages), None)

    def _preempt_newest_holder(self) -> bool:
        """When nothing can run: take the newest holder's pages for the oldest sequence. False when that is no help."""
        victim = self._newest_holder()
        if victim is None or victim is next(iter(self._sequences.values())):
            return False
        self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        sequence.computed_before = max(sequence.computed_before, sequence.computed)
        retire(self._pool, sequence)
        finds_again = sequence.shares_prefix and self._pool.cache.enabled
        sequence.expected_cached = sequence.computed if finds_again else 0
        sequence.computed = 0
        sequence.state = SequenceState.WAITING
        self.preemptions += 1


def retire(pool: PagePool, sequence: Sequence) -> None:
    """Its pages are others' to have; what it computed stays in the cache until they are wanted."""
    if sequence.handle is None:
        return
    if sequence.publishes:
        pool.publish(sequence, sequence.tokens[: sequence.computed], tail=True)
    pool.release(sequence)
