"""What runs in the next step, and who gets pages.

Owns: the live sequences from their coming to their ending, and the step in flight. Does not know: how a step is put
together (``BatchBuilder``), where pages come from (``PagePool``), how leases live (``ReservationTable``), tokens' meaning,
sampling, threads, the clock (``now`` is handed in). Not thread-safe.

The rules:
- A step has every running decode (one token each), then prefill chunks of together at most ``chunk_size_tokens``:
  a long prompt never stops a decode. At most ``max_batch_size`` sequences run at once, at most
  ``max_concurrent_prefills`` of them between their first and their last chunk; what was received may always go on.
- Prompts with less to compute first, with aging. The first that finds no pages closes the door behind it.
- A sequence takes the pages of all its tokens when it starts, as many of them shared as the prefix cache has, then one
  page at a time. A start leaves one page for each running decode, and the share above ``memory_threshold`` unless
  nothing runs. Cached pages that nobody pins count as free: they are evicted when they are wanted.
- When a decode finds no page, the newest other sequence is preempted: what it computed goes to the cache, its pages can
  be had, and it computes its tokens again later, or finds them cached. Only older ones preempt, so no two sequences
  preempt each other in turn.
- If nothing can run, the newest sequence that holds pages is preempted until the oldest can. Only leases may then be in
  the way. They end, unless who renews them waits for a send that waits here for their pages (two engines may send to
  each other, or one to itself): after ``page_wait_s`` the newest send is given up. So there is no deadlock.
- Only K/V that is there is published: of a prompt when it is computed to its end, of a received one when its lease is
  committed, of the rest when the sequence ends or is preempted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from microserving.errors import InternalError, LeaseError, Overloaded, RequestConflict
from microserving.scheduler.batch import BatchBuilder, retire
from microserving.scheduler.config import SchedulerConfig
from microserving.scheduler.page_allocator import PageCounts
from microserving.scheduler.page_pool import PagePool
from microserving.scheduler.prefix_cache import PrefixCache
from microserving.scheduler.reservations import LeasedPages, LeaseState, ReservationTable
from microserving.scheduler.sequence import Sequence, SequenceKind, SequenceState
from microserving.scheduler.step import Chunk, Step

RETRY_AFTER_S = 1.0


class Scheduler:
    """``schedule`` -> the caller runs the step -> ``complete``; at most one step is in flight."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._pool = PagePool(
            config.total_pages, config.page_size, prefix_cache=config.prefix_cache == "radix"
        )
        self._leases = ReservationTable(self._pool, config.lease_ttl_s)
        self._sequences: dict[tuple[SequenceKind, str], Sequence] = {}  # live, in order of arrival
        self._batch = BatchBuilder(config, self._pool, self._sequences)
        self._in_flight: list[Chunk] = []
        self._next_number = 0
        self._claims_dropped = 0
        self._stalled_until: float | None = None  # the sends may wait so long while nothing can run

    # --- sequences -------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises RequestConflict (live id), Overloaded (queue full)."""
        self._require_new(sequence)
        self._require_room()
        if sequence.shares_prefix:
            sequence.expected_cached = self.match_prefix(sequence.salt, sequence.tokens)
        self._admit(sequence)

    def add_received(self, sequence: Sequence) -> None:
        """Queue a generation whose first positions were received: commits the lease. Raises LeaseError, RequestConflict.

        The K/V is published, as far as this sequence does not write into it: its last position is computed here in any
        case, for its logits. What the cache has beyond the lease by now is used.
        """
        self._require_new(sequence)
        lease = self._leases.commit(sequence.request_id, sequence.arrival)
        sequence.salt = lease.salt
        self._pool.hand_over(lease, sequence)
        if sequence.pages:
            self._receive(sequence, lease)
        else:  # nothing was wanted of the sender: it starts like any other
            self._pool.release(sequence)
        self._admit(sequence)

    def add_instead(self, sequence: Sequence) -> None:
        """Queue a generation that has no use for what was received for it: its lease, if it has one, ends. Raises
        RequestConflict, Overloaded; then nothing was changed."""
        self._require_new(sequence)
        if sequence.request_id not in self._leases:
            self._require_room()
        self.abort_reservation(sequence.request_id, "not wanted")
        self._admit(sequence)

    def _receive(self, sequence: Sequence, lease: LeasedPages) -> None:
        last = len(sequence.tokens) - 1
        received = min(lease.end, last)
        self._pool.copies_made(sequence)
        self._pool.publish(sequence, sequence.tokens[:received])
        sequence.computed = max(received, self._pool.adopt(sequence, sequence.tokens[:last]))
        self._pool.cache.count(last - received, sequence.computed - received)
        sequence.computed_before = received
        sequence.cached_tokens = min(lease.begin, received) + sequence.computed - received
        sequence.started = True

    def get(self, kind: SequenceKind, request_id: str) -> Sequence | None:
        return self._sequences.get((kind, request_id))

    def finish(self, sequence: Sequence, publish: bool = True) -> None:
        """End a live sequence. Its pages are released now, or by ``complete`` when it is in the running step.

        publish: what it computed (in completed steps) is good, and goes to the prefix cache.
        """
        if self._sequences.pop(sequence.key, None) is not sequence:
            raise InternalError(f"sequence {sequence.request_id!r} ended twice")
        sequence.state = SequenceState.FINISHED
        sequence.publishes = publish
        if self._batch.pages_wanted:  # by this one, perhaps; ``schedule`` finds out
            self._batch.pages_wanted = 0
            self._claims_dropped += 1
        if not self.is_in_flight(sequence):
            retire(self._pool, sequence)

    def is_in_flight(self, sequence: Sequence) -> bool:
        return any(chunk.sequence is sequence for chunk in self._in_flight)

    def expired_sequences(self, now: float) -> list[Sequence]:
        """The live sequences whose deadline has come; the caller ends them."""
        return [s for s in self._sequences.values() if s.is_late(now)]

    # --- steps -----------------------------------------------------------------------------------------------

    def schedule(self, now: float, prefill_budget: int | None = None) -> Step:
        """The next step; falsy when nothing can run. Until ``complete`` its pages stay as they are.

        now: a sequence whose deadline has come is not started. prefill_budget: prefill tokens of a step that
        also has decodes; None = ``chunk_size_tokens``. 0 = none in this step: the caller sees to it that prefills go on.
        """
        if self._in_flight:
            raise InternalError("the last step is not complete")
        step = self._batch.build(now, prefill_budget)
        self._in_flight = step.chunks
        if step:
            self._stalled_until = None
        return step

    def send_to_give_up(self, now: float) -> Sequence | None:
        """The newest send, once nothing could run for ``page_wait_s``. Call it when ``schedule`` found nothing."""
        sends = [s for s in self._sequences.values() if s.kind is SequenceKind.SEND]
        if not sends:
            self._stalled_until = None
        elif self._stalled_until is None:
            self._stalled_until = now + self.config.page_wait_s
        elif now >= self._stalled_until:
            self._stalled_until = None
            return sends[-1]
        return None

    def complete(self, ok: bool = True, bad: Iterable[Sequence] = ()) -> None:
        """The step ran: count its tokens as computed, publish whole prompts, release what ended meanwhile.

        ok: False = it failed. Nothing of it counts, and the caller must end its sequences without publishing them.
        bad: the sequences that did not get what they should, which the caller must end likewise.
        Call it before tokens are appended to the sequences.
        """
        for sequence in bad:
            sequence.publishes = False
        chunks, self._in_flight = self._in_flight, []
        for chunk in chunks:
            chunk.sequence.publishes = chunk.sequence.publishes and ok
            if chunk.sequence.state is SequenceState.FINISHED:
                retire(self._pool, chunk.sequence)
            elif ok:
                self._advance(chunk)

    def _advance(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.length
        if chunk.decode:
            return
        self._pool.copies_made(sequence)
        if chunk.last:
            sequence.state = SequenceState.DECODE
            if sequence.publishes:
                self._pool.publish(sequence, sequence.tokens[: sequence.computed])

    # --- reservations ----------------------------------------------------------------------------------------

    def try_reserve(
        self, request_id: str, prompt: tuple[int, ...], end: int, now: float, salt: str = ""
    ) -> LeasedPages | None:
        """Lease pages for positions [0, end), shared with the prefix cache as far as it has them; None when they lack.

        The lease's ``copies`` are the caller's to make before the lease is used. Waiting sequences are not passed by.
        Raises RequestConflict (live id), Overloaded (too many live requests).
        """
        if (SequenceKind.GENERATE, request_id) in self._sequences or request_id in self._leases:
            raise RequestConflict(f"request {request_id!r} is live", param="request_id")
        self._require_room()
        idle = not self._batch.running and not len(self._leases)
        spare = self._batch.pages_wanted + self._batch.spare(idle=idle)
        lease = self._leases.issue(request_id, prompt, end, now, salt=salt, spare=spare)
        if lease is not None:
            self._pool.cache.count(end, lease.begin)
        return lease

    def commit(self, request_id: str, now: float) -> int:
        """Put the K/V of an arrived lease into the prefix cache and end the lease; returns how many tokens it was.

        Raises LeaseError when the lease is unknown, has ended, or not all of its K/V has arrived.
        """
        lease = self._leases.commit(request_id, now)
        self._pool.copies_made(lease)
        self._pool.publish(lease, lease.prompt[: lease.end], tail=True)
        self._pool.release(lease)
        return lease.end if self._pool.cache.enabled else 0

    def reservation(self, request_id: str) -> LeasedPages | None:
        return self._leases.get(request_id)

    def require_not_ended(self, request_id: str) -> None:
        """Raises LeaseError when the request's reservation ended without being committed."""
        reason = self._leases.ending(request_id)
        if reason is not None:
            raise LeaseError(
                f"the reservation of request {request_id!r} has ended ({reason})", param="request_id"
            )

    def renew(self, request_id: str, now: float) -> float:
        return self._leases.renew(request_id, now)

    def begin_write(self, request_id: str, lease_id: int, now: float) -> bool:
        return self._leases.begin_write(request_id, lease_id, now)

    def end_write(self, lease_id: int, ok: bool, now: float) -> LeasedPages | None:
        return self._leases.end_write(lease_id, ok, now)

    def abort_reservation(self, request_id: str, reason: str = "aborted") -> bool:
        return self._leases.abort(request_id, reason)

    def abort_all_reservations(self) -> None:
        for request_id in self._leases.request_ids():
            self.abort_reservation(request_id)

    def expire(self, now: float) -> list[LeasedPages]:
        return self._leases.expire(now)

    def take_revoked(self) -> list[int]:
        return self._leases.take_revoked()

    # --- what is going on ------------------------------------------------------------------------------------

    @property
    def pages(self) -> PageCounts:
        return self._pool.counts

    @property
    def prefix_cache(self) -> PrefixCache:
        """For its counters and page counts: pinned, evictable, query_tokens, hit_tokens, evicted_pages."""
        return self._pool.cache

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its pages to another."""
        return self._batch.preemptions

    @property
    def pages_freed(self) -> int:
        """Moves whenever pages became available, or unclaimed: who waits for pages looks at it."""
        return self._pool.freed + self._claims_dropped

    @property
    def live_leases(self) -> int:
        return len(self._leases)

    @property
    def lease_states(self) -> dict[LeaseState, int]:
        """How many live leases are in each state that a live one has."""
        return self._leases.states()

    @property
    def next_deadline(self) -> float | None:
        """When a lease expires, a sequence must end, or a send has waited enough."""
        times = [s.deadline for s in self._sequences.values()]
        times += (self._leases.next_expiry, self._stalled_until)
        return min((time for time in times if time is not None), default=None)

    def match_prefix(self, salt: str, tokens: Seq[int]) -> int:
        """How many of the first ``tokens`` are cached. Reads only."""
        return self._pool.cache.match(salt, tokens)

    def sequences(self) -> Iterator[Sequence]:
        """The live sequences, in order of arrival."""
        return iter(self._sequences.values())

    def check(self) -> None:
        """Raises InternalError when a page is not where it belongs. Costs O(pages): for tests and idle time."""
        self._pool.allocator.check()
        finishing = [c.sequence for c in self._in_flight if c.sequence.state is SequenceState.FINISHED]
        holders = [s for s in (*self._sequences.values(), *finishing) if s.handle is not None]
        handles = [s.handle for s in holders if s.handle is not None]
        self._pool.cache.check([*handles, *self._leases.handles()])
        held = [page for s in holders if s.handle is not None for page in s.pages[s.handle.shared :]]
        if len(set(held)) != len(held) or len(held) != self.pages.running:
            raise InternalError(f"sequences hold {len(held)} pages, {self.pages.running} are running")
        for s in self._sequences.values():
            if s.computed > len(s.pages) * self.config.page_size:
                raise InternalError(f"sequence {s.request_id!r} computed more than its pages hold")

    # --- helpers ---------------------------------------------------------------------------------------------

    def _require_new(self, sequence: Sequence) -> None:
        if sequence.key in self._sequences:
            raise RequestConflict(f"request {sequence.request_id!r} is live", param="request_id")

    def _require_room(self) -> None:
        live = len(self._sequences) + len(self._leases)
        if live >= self.config.max_sequences:
            raise Overloaded(f"the engine already has {live} requests", retry_after_s=RETRY_AFTER_S)
        limit = self.config.ingestion_queue_size
        if limit is not None and self._batch.in_state(SequenceState.WAITING) >= limit:
            raise Overloaded(f"{limit} requests already wait for the engine", retry_after_s=RETRY_AFTER_S)

    def _admit(self, sequence: Sequence) -> None:
        sequence.number = self._next_number
        self._next_number += 1
        self._sequences[sequence.key] = sequence
