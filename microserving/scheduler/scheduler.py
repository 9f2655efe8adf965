"""What runs in the next step, and who gets pages.

Owns: the live sequences, their order, the pages (through ``PageAllocator``) and the leases (``ReservationTable``).
Does not know: tokens' meaning, sampling, threads, the clock (``now`` is handed in). Not thread-safe.

The rules:
- A step has every running decode (one token each), then prefill chunks of together at most ``chunk_size_tokens``:
  a long prompt never stops a decode. At most ``max_batch_size`` sequences run at once.
- Prefills go by ``remaining tokens + AGING_TOKENS_PER_S * arrival``: shorter first, but nothing overtakes a prompt of n
  tokens that came n / AGING_TOKENS_PER_S seconds later. The first that finds no pages closes the door behind it.
- A sequence takes the pages of all its tokens when it starts, then one page at a time. When a decode finds none, the
  newest other sequence is preempted: its pages are freed and it computes its tokens again later.
- If nothing can run, the newest sequence that holds pages is preempted until the oldest can. Only leases may then be in
  the way. They end, unless who renews them waits for a send that waits here for their pages (two engines may send to
  each other, or one to itself): after ``page_wait_s`` the newest send is given up. So there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from microserving.errors import InternalError, LeaseError, Overloaded, RequestConflict
from microserving.scheduler.page_allocator import PageAllocator, PageCounts, PageState
from microserving.scheduler.reservations import LeasedPages, ReservationTable
from microserving.scheduler.sequence import Sequence, SequenceKind, SequenceState

AGING_TOKENS_PER_S = 1000.0
"""How many tokens longer a prompt may be that waited one second longer, and still go first. Near a CPU's prefill rate."""

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes in pages, tokens or sequences as named. page_wait_s: how long a send may wait while nothing can run."""

    total_pages: int
    page_size: int
    chunk_size_tokens: int
    max_batch_size: int
    max_sequences: int
    lease_ttl_s: float
    page_wait_s: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute ``sequence.tokens[start : start + length]``.

    last: nothing remains after it (a token may be sampled). decode: the one token of a running decode.
    """

    sequence: Sequence
    start: int
    length: int
    last: bool
    decode: bool = False


class Scheduler:
    """``schedule`` -> the caller runs the chunks -> ``complete``; at most one batch is in flight.

    ``pages_freed`` counts the times that pages became free (or unclaimed): who waits for pages looks whether it moved.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pages_freed = 0
        self.preemptions = 0
        self._allocator = PageAllocator(config.total_pages)
        self._leases = ReservationTable(self._allocator, config.lease_ttl_s)
        self._sequences: dict[tuple[SequenceKind, str], Sequence] = {}  # live, in order of arrival
        self._in_flight: list[Chunk] = []
        self._next_number = 0
        self._pages_wanted = 0  # by the first sequence that found no pages in the last ``schedule``
        self._stalled_until: float | None = None  # the sends may wait so long while nothing can run

    # --- sequences -------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises RequestConflict (live id), Overloaded (queue full)."""
        self._require_new(sequence)
        self._require_room()
        self._admit(sequence)

    def add_received(self, sequence: Sequence) -> None:
        """Queue a generation whose first positions were received: commits the lease. Raises LeaseError, RequestConflict.

        The last position is computed here in any case, for its logits.
        """
        self._require_new(sequence)
        lease = self._leases.commit(sequence.request_id, sequence)
        sequence.pages = lease.pages
        sequence.computed = min(lease.end, len(sequence.tokens) - 1)
        sequence.computed_before = sequence.computed
        self._admit(sequence)

    def get(self, kind: SequenceKind, request_id: str) -> Sequence | None:
        return self._sequences.get((kind, request_id))

    def finish(self, sequence: Sequence) -> None:
        """End a live sequence. Its pages are freed now, or by ``complete`` when it is in the running step."""
        if self._sequences.pop(sequence.key, None) is not sequence:
            raise InternalError(f"sequence {sequence.request_id!r} ended twice")
        sequence.state = SequenceState.FINISHED
        if self._pages_wanted:  # by this one, perhaps; ``schedule`` finds out
            self._pages_wanted = 0
            self.pages_freed += 1
        if not self.is_in_flight(sequence):
            self._release(sequence)

    def is_in_flight(self, sequence: Sequence) -> bool:
        return any(chunk.sequence is sequence for chunk in self._in_flight)

    # --- steps -----------------------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """The next step; empty when nothing can run. Until ``complete`` the chunks' pages stay as they are."""
        if self._in_flight:
            raise InternalError("the last step is not complete")
        chunks = self._build()
        while not chunks and self._preempt_newest_holder():
            chunks = self._build()
        self._in_flight = chunks
        if chunks:
            self._stalled_until = None
        return chunks

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

    def complete(self) -> None:
        """The step ran (or failed): count its tokens as computed, and free what ended meanwhile.

        Call it before tokens are appended to the sequences.
        """
        chunks, self._in_flight = self._in_flight, []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.state is SequenceState.FINISHED:
                self._release(sequence)
                continue
            sequence.computed = chunk.start + chunk.length
            if chunk.last:
                sequence.state = SequenceState.DECODE

    def _build(self) -> list[Chunk]:
        chunks = [Chunk(s, s.computed, 1, last=True, decode=True) for s in self._decodes_with_pages()]
        budget = self.config.chunk_size_tokens
        running = sum(
            s.state in (SequenceState.PREFILL, SequenceState.DECODE) for s in self._sequences.values()
        )
        destination = None
        self._pages_wanted = 0
        for sequence in self._prefill_order():
            if budget == 0:
                break
            if sequence.kind is SequenceKind.SEND and destination not in (None, sequence.destination):
                continue
            if sequence.state is SequenceState.WAITING:
                if running >= self.config.max_batch_size or not self._start(sequence):
                    continue
                running += 1
            if sequence.kind is SequenceKind.SEND:
                destination = sequence.destination
            length = min(budget, sequence.remaining)
            budget -= length
            chunks.append(Chunk(sequence, sequence.computed, length, length == sequence.remaining))
        return chunks

    def _decodes_with_pages(self) -> list[Sequence]:
        """The decodes that have a page for their next token, oldest first; may preempt newer sequences."""
        ready: list[Sequence] = []
        for sequence in list(self._sequences.values()):
            if sequence.state is SequenceState.DECODE and self._grow(sequence):
                ready.append(sequence)
        return ready

    def _grow(self, sequence: Sequence) -> bool:
        """One more page if the next token needs it: a free one, or the newest newer sequence's."""
        if not self._pages_missing(sequence):
            return True
        if self._allocator.free == 0:
            victim = self._newest_holder()
            if victim is None or victim is sequence:
                return False
            self._preempt(victim)
        self._take_pages(sequence)
        return True

    def _start(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the pages of all its tokens, beyond one for each running decode."""
        missing = self._pages_missing(sequence)
        if self._pages_wanted and not sequence.pages:
            return False
        if missing and self._allocator.free < missing + self._decode_headroom():
            self._pages_wanted = self._pages_wanted or missing
            return False
        self._take_pages(sequence)
        sequence.state = SequenceState.PREFILL
        return True

    def _prefill_order(self) -> list[Sequence]:
        pending = (
            s for s in self._sequences.values() if s.state in (SequenceState.WAITING, SequenceState.PREFILL)
        )
        return sorted(pending, key=lambda s: (s.remaining + AGING_TOKENS_PER_S * s.arrival, s.number))

    # --- reservations ----------------------------------------------------------------------------------------

    def try_reserve(
        self, request_id: str, prompt: tuple[int, ...], begin: int, end: int, now: float
    ) -> LeasedPages | None:
        """Lease pages for positions [0, end); None when they are not there now.

        Waiting sequences are not passed by. Raises RequestConflict (live id), Overloaded (too many live requests).
        """
        if (SequenceKind.GENERATE, request_id) in self._sequences or request_id in self._leases:
            raise RequestConflict(f"request {request_id!r} is live", param="request_id")
        self._require_room()
        pages = self._pages_for(end)
        if pages and self._allocator.free < pages + self._pages_wanted + self._decode_headroom():
            return None
        return self._leases.issue(request_id, prompt, begin, end, pages, now)

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
        free = self._allocator.free
        lease = self._leases.end_write(lease_id, ok, now)
        self._note_freed(free)
        return lease

    def abort_reservation(self, request_id: str, reason: str = "aborted") -> bool:
        free = self._allocator.free
        ended = self._leases.abort(request_id, reason)
        self._note_freed(free)
        return ended

    def abort_all_reservations(self) -> None:
        for request_id in self._leases.request_ids():
            self.abort_reservation(request_id)

    def expire(self, now: float) -> list[LeasedPages]:
        free = self._allocator.free
        late = self._leases.expire(now)
        self._note_freed(free)
        return late

    def take_revoked(self) -> list[int]:
        return self._leases.take_revoked()

    # --- what is going on ------------------------------------------------------------------------------------

    @property
    def pages(self) -> PageCounts:
        return self._allocator.counts

    @property
    def live_leases(self) -> int:
        return len(self._leases)

    @property
    def next_deadline(self) -> float | None:
        """When a lease expires, or a send has waited enough."""
        times = (self._leases.next_expiry, self._stalled_until)
        return min((time for time in times if time is not None), default=None)

    def sequences(self) -> Iterator[Sequence]:
        """The live sequences, in order of arrival."""
        return iter(self._sequences.values())

    def check(self) -> None:
        """Raises InternalError when a page is not where it belongs. Costs O(pages): for tests and idle time."""
        self._allocator.check()
        finishing = [c.sequence for c in self._in_flight if c.sequence.state is SequenceState.FINISHED]
        held = [page for s in (*self._sequences.values(), *finishing) for page in s.pages]
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

    def _admit(self, sequence: Sequence) -> None:
        sequence.number = self._next_number
        self._next_number += 1
        self._sequences[sequence.key] = sequence

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    def _pages_missing(self, sequence: Sequence) -> int:
        return self._pages_for(len(sequence.tokens)) - len(sequence.pages)

    def _take_pages(self, sequence: Sequence) -> None:
        missing = self._pages_missing(sequence)
        sequence.pages += self._allocator.allocate(missing, PageState.RUNNING, sequence)

    def _decode_headroom(self) -> int:
        return sum(s.state is SequenceState.DECODE for s in self._sequences.values())

    def _newest_holder(self) -> Sequence | None:
        return next((s for s in reversed(self._sequences.values()) if s.pages), None)

    def _preempt_newest_holder(self) -> bool:
        """When nothing can run: free the newest holder's pages for the oldest sequence. False when that is no help."""
        victim = self._newest_holder()
        if victim is None or victim is next(iter(self._sequences.values())):
            return False
        self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        sequence.computed_before = max(sequence.computed_before, sequence.computed)
        sequence.computed = 0
        sequence.state = SequenceState.WAITING
        self.preemptions += 1
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.pages:
            self._allocator.release(sequence.pages, sequence)
            self.pages_freed += 1
        sequence.pages = []

    def _note_freed(self, free_before: int) -> None:
        self.pages_freed += self._allocator.free > free_before
