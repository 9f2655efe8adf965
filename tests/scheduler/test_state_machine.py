"""Everything that can happen to a scheduler, in any order, with the K/V that its pages would hold.

Memory is modelled slot by slot: the K/V of position p is the salt and all tokens up to p. Chunks write and read it, copies
copy it, writers of leases fill it in parts, and write rubbish when their lease is over. So a page that is freed while it
is read, given away while it is written to, published too early or copied too late, is seen by whoever reads it.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from microserving.errors import LeaseError, Overloaded, RequestConflict
from microserving.scheduler import (
    Chunk,
    LeasedPages,
    LeaseState,
    Scheduler,
    SchedulerConfig,
    Sequence,
    SequenceKind,
    Step,
)

from .state_model import CACHE, LIVE, PAGE, TTL, Memory, Published, Request, Writer

pytestmark = [
    pytest.mark.timeout(600),  # to make a failing example short takes long
    *(pytest.mark.case(name) for name in ("PD-03", "PX-09", "PX-11", "MT-01")),
]


class SchedulerMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    writers = Bundle("writers")

    @initialize(
        total=st.integers(3, 12),
        chunk=st.integers(1, 12),
        batch=st.integers(1, 4),
        sequences=st.integers(2, 8),
        cache=st.sampled_from(["radix", "radix", "radix", "off"]),
        prefills=st.sampled_from([None, 1, 2]),
        threshold=st.sampled_from([1.0, 1.0, 0.85, 0.5]),
        chunked=st.booleans(),
        queue=st.sampled_from([None, 3]),
        seed=st.integers(0, 1000),
    )
    def start(self, total, chunk, batch, sequences, cache, prefills, threshold, chunked, queue, seed) -> None:  # type: ignore[no-untyped-def]
        limits = (cache, prefills, threshold, chunked, queue)
        self.scheduler = Scheduler(
            SchedulerConfig(total, PAGE, chunk, batch, sequences, TTL, TTL / 2, *limits)
        )
        self.random = random.Random(seed)  # what tokens follow: their values are of no interest to shrinking
        self.memory = Memory()
        self.published = Published(self.scheduler._pool.allocator)
        self.now = 0.0
        self.count = 0
        self.counters = (0, 0, 0, 0)
        self.bank: list[list[int]] = [[]]
        self.requests: dict[tuple[SequenceKind, str], Request] = {}
        self.received: set[Sequence] = set()
        self.ended: list[Request] = []
        self.step: Step | None = None
        self.step_pages: list[list[int]] = []
        self.writing: dict[int, Writer] = {}
        self.max_tokens = total * PAGE

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def prompt(self, fork: int, length: int, room: int = 0) -> list[int]:
        """An earlier prompt or output, or its beginning, going on in its own way; it leaves ``room`` in the pool."""
        most = self.max_tokens - room
        if self.random.random() < 0.7:
            most = max(most // 3, 1)
        base = self.bank[fork % len(self.bank)][:most]
        if not base or self.random.random() < 0.6:
            length = 1 + length % most
            base = base[: self.random.choice([length, length * 3 // 4, length // 2])]
            base = base + [self.random.randint(0, 1) for _ in range(length - len(base))]
            self.bank = [*self.bank[-7:], base]
        return list(base)

    # --- reservations

    @rule(
        target=leases,
        fork=st.integers(0, 7),
        length=st.integers(0, 60),
        split=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def prepare(self, fork: int, length: int, split: float, salt: str) -> object:
        tokens = self.prompt(fork, length)
        end = int(split * len(tokens))
        expected = self.published.longest(salt, tokens[:end])
        try:
            lease = self.scheduler.try_reserve(self.name(), tuple(tokens), end, self.now, salt)
        except Overloaded:
            return multiple()
        if lease is None:
            return multiple()
        assert len(lease.pages) == -(-end // PAGE)
        assert lease.shared == min(expected, len(tokens) - 1) // PAGE
        assert lease.begin in (expected, lease.shared * PAGE)  # without a page for the source, no copy
        assert (lease.begin == end) == (lease.state is LeaseState.ARRIVED)
        self.memory.copy(lease.copies)
        self.memory.require(lease.pages, salt, tokens, lease.begin)
        return lease

    @rule(lease=leases)
    def receive(self, lease: LeasedPages) -> None:
        """All of it, without a hitch."""
        writer = self.begin(lease)
        if isinstance(writer, Writer):
            self.end(writer, ok=True)

    @rule(target=writers, lease=leases)
    def begin(self, lease: LeasedPages) -> object:
        granted = self.scheduler.begin_write(lease.request_id, lease.lease_id, self.now)
        assert not granted or lease.state is LeaseState.WRITING
        if not granted:
            return multiple()
        writer = Writer(lease, list(lease.pages), lease.shared, lease.begin)
        self.writing[lease.lease_id] = writer
        return writer

    @rule(writer=writers, count=st.integers(1, 12))
    def write(self, writer: Writer, count: int) -> None:
        lease = writer.lease
        if lease.lease_id not in self.writing:
            return
        if lease.state is LeaseState.ENDED:
            self.memory.spoil(writer.pages, lease.begin, lease.end)
            return
        end = min(writer.written + count, lease.end)
        self.memory.write(writer.pages, lease.salt, list(lease.prompt), writer.written, end)
        writer.written = end

    @rule(writer=consumes(writers), ok=st.booleans())
    def end(self, writer: Writer, ok: bool) -> None:
        lease = writer.lease
        if lease.lease_id not in self.writing:
            return
        if ok:
            self.write(writer, self.max_tokens)
        arrived = self.scheduler.end_write(lease.lease_id, ok, self.now)
        del self.writing[lease.lease_id]
        assert (arrived is lease) == (lease.state is LeaseState.ARRIVED)
        assert ok or arrived is None

    @rule(lease=leases, output=st.integers(0, 40))
    def generate_from(self, lease: LeasedPages, output: int) -> None:
        sequence = Sequence(lease.request_id, SequenceKind.GENERATE, list(lease.prompt), self.now)
        usable = lease.state is LeaseState.ARRIVED and lease.expires_at > self.now
        try:
            self.scheduler.add_received(sequence)
        except (LeaseError, RequestConflict):
            assert not usable
            return
        assert usable
        self.received.add(sequence)
        assert sequence.computed >= min(lease.end, len(sequence.tokens) - 1)
        self.memory.require(sequence.pages, sequence.salt, sequence.tokens, sequence.computed)
        room = self.max_tokens - len(lease.prompt)
        self.requests[sequence.key] = Request(sequence, 1 + output % room if room else 1)

    @rule(
        fork=st.integers(0, 7),
        length=st.integers(0, 60),
        split=st.sampled_from([0.1, 0.5, 1.0]),
        output=st.integers(0, 40),
    )
    def hand_off(self, fork: int, length: int, split: float, output: int) -> None:
        """The three of them without a hitch."""
        lease = self.prepare(fork, length, split, "")
        if isinstance(lease, LeasedPages):
            self.receive(lease)
            self.generate_from(lease, output)

    @rule(lease=leases)
    def commit(self, lease: LeasedPages) -> None:
        usable = lease.state is LeaseState.ARRIVED and lease.expires_at > self.now
        if not usable:
            with pytest.raises(LeaseError):
                self.scheduler.commit(lease.request_id, self.now)
            return
        cached = self.scheduler.commit(lease.request_id, self.now)
        assert cached == (lease.end if self.scheduler.config.prefix_cache == "radix" else 0)
        assert self.scheduler.match_prefix(lease.salt, lease.prompt[: lease.end]) == cached

    @rule(lease=leases)
    def abort_lease(self, lease: LeasedPages) -> None:
        live = lease.state in LIVE
        assert self.scheduler.abort_reservation(lease.request_id) == live

    @rule(lease=leases)
    def renew(self, lease: LeasedPages) -> None:
        if lease.state in LIVE:
            assert self.scheduler.renew(lease.request_id, self.now) == lease.expires_at == self.now + TTL
        else:
            with pytest.raises(LeaseError):
                self.scheduler.renew(lease.request_id, self.now)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.scheduler.expire(self.now):
            assert lease.expires_at <= self.now
        for sequence in self.scheduler.expired_sequences(self.now):
            self.finish(self.requests[sequence.key])
        deadline = self.scheduler.next_deadline
        stalled = self.scheduler._stalled_until
        assert deadline is None or deadline > self.now or deadline == stalled

    # --- sequences

    @rule(
        fork=st.integers(0, 7),
        length=st.integers(0, 60),
        output=st.integers(0, 40),
        salt=st.sampled_from(["", "", "tenant"]),
        patience=st.sampled_from([None, None, None, 3.0]),
        resumed=st.integers(0, 3),
        twins=st.integers(1, 3),
    )
    def submit(
        self,
        fork: int,
        length: int,
        output: int,
        salt: str,
        patience: float | None,
        resumed: int,
        twins: int,
    ) -> None:
        tokens = self.prompt(fork, length, room=1)
        for _ in range(twins):
            sequence = Sequence(self.name(), SequenceKind.GENERATE, list(tokens), self.now, salt=salt)
            sequence.prompt_length = max(1, len(tokens) - resumed)
            sequence.deadline = None if patience is None else self.now + patience
            self.add(sequence, len(tokens) + 1 + output % (self.max_tokens - len(tokens)))

    @rule(fork=st.integers(0, 7), length=st.integers(0, 60), destination=st.sampled_from("xy"))
    def submit_send(self, fork: int, length: int, destination: str) -> None:
        tokens = self.prompt(fork, length)
        self.add(Sequence(self.name(), SequenceKind.SEND, tokens, self.now, destination), 0)

    def add(self, sequence: Sequence, most: int) -> None:
        try:
            self.scheduler.add(sequence)
        except Overloaded:
            return
        self.requests[sequence.key] = Request(sequence, most - sequence.prompt_length)

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        if self.requests:
            self.finish(list(self.requests.values())[pick % len(self.requests)])

    def finish(self, request: Request, publish: bool = True) -> None:
        self.scheduler.finish(request.sequence, publish)
        del self.requests[request.sequence.key]
        request.endings += 1
        self.ended.append(request)
        self.bank = [*self.bank[-7:], list(request.sequence.tokens)]

    @rule(fork=st.integers(0, 7), length=st.integers(0, 60), salt=st.sampled_from(["", "tenant", "other"]))
    def match(self, fork: int, length: int, salt: str) -> None:
        tokens = self.prompt(fork, length)
        assert self.scheduler.match_prefix(salt, tokens) == self.published.longest(salt, tokens)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        cache = self.scheduler.prefix_cache
        before = len(cache)
        wanted = min(count, cache.evictable)
        cache.evict(wanted)
        assert len(cache) == before - wanted

    # --- steps

    @rule(budget=st.sampled_from([None, None, 1, 3]))
    def schedule(self, budget: int | None = None) -> None:
        if self.step is not None:
            return
        step = self.scheduler.schedule(self.now, budget)
        self.check_step(step.chunks, budget)
        if step:
            self.step = step
            self.step_pages = [list(chunk.sequence.pages) for chunk in step.chunks]
        else:
            assert not step.copies
            self.give_up()

    @rule(steps=st.integers(1, 16))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.complete()
            self.schedule()

    def give_up(self) -> None:
        sequence = self.scheduler.send_to_give_up(self.now)
        if sequence is not None:
            assert sequence.kind is SequenceKind.SEND
            assert self.leases_in_the_way(), "nothing but leases may cost a send its life"
            self.finish(self.requests[sequence.key])

    def leases_in_the_way(self) -> bool:
        return bool(self.scheduler.live_leases or self.scheduler.pages.quarantined)

    @rule()
    def complete(self) -> None:
        if self.step is None:
            return
        step, self.step = self.step, None
        self.execute(step)
        self.scheduler.complete()
        for chunk in step.chunks:
            request = self.requests.get(chunk.sequence.key)
            if request is None or request.sequence is not chunk.sequence:
                continue
            request.put.update(range(chunk.cached_from, chunk.start + chunk.length))
            if chunk.last:
                self.advance(request)

    @rule()
    def fail(self) -> None:
        """The step raises somewhere in the middle."""
        if self.step is None:
            return
        step, self.step = self.step, None
        for chunk, pages in zip(step.chunks, self.step_pages, strict=True):
            self.memory.spoil(pages, chunk.start, chunk.start + chunk.length)
        self.scheduler.complete(ok=False)
        for chunk in step.chunks:
            request = self.requests.get(chunk.sequence.key)
            if request is not None and request.sequence is chunk.sequence:
                self.finish(request, publish=False)

    def advance(self, request: Request) -> None:
        sequence = request.sequence
        produced = len(sequence.tokens) - sequence.prompt_length + 1
        if sequence.kind is SequenceKind.SEND:
            assert request.put == set(range(len(sequence.tokens)))
            self.finish(request)
        elif produced >= request.target:
            self.finish(request)
        else:
            sequence.tokens.append(self.random.randint(0, 1))

    def execute(self, step: Step) -> None:
        self.memory.copy(step.copies)
        allocator = self.scheduler._pool.allocator
        for chunk, pages in zip(step.chunks, self.step_pages, strict=True):
            sequence, end = chunk.sequence, chunk.start + chunk.length
            for page in {pages[p // PAGE] for p in range(chunk.start, end)}:
                assert allocator.owner(page) is sequence, "it writes into a page that is not its own"
            self.memory.write(pages, sequence.salt, sequence.tokens, chunk.start, end)
        for chunk, pages in zip(step.chunks, self.step_pages, strict=True):
            sequence = chunk.sequence
            self.memory.require(pages, sequence.salt, sequence.tokens, chunk.start + chunk.length)

    def check_step(self, chunks: list[Chunk], budget: int | None) -> None:
        config = self.scheduler.config
        prefills = [c for c in chunks if not c.decode]
        assert len(chunks) <= config.max_batch_size
        started = [c for c in prefills if c.sequence not in self.received]
        assert len(started) <= (config.max_concurrent_prefills or len(started))
        most = config.chunk_size_tokens
        if budget is not None and len(prefills) < len(chunks):
            most = min(most, budget)
        assert sum(c.length for c in prefills) <= most or not config.chunked_prefill_enabled
        assert len({c.sequence.destination for c in chunks if c.sequence.kind is SequenceKind.SEND}) <= 1
        assert len({id(c.sequence) for c in chunks}) == len(chunks)
        for chunk in chunks:
            self.check_chunk(chunk)
        if self.requests and not self.leases_in_the_way():
            assert chunks, "only leases may keep the engine from going on"

    def check_chunk(self, chunk: Chunk) -> None:
        sequence, end = chunk.sequence, chunk.start + chunk.length
        assert chunk.length > 0 or (sequence.kind is SequenceKind.SEND and chunk.last)
        assert chunk.cached_from <= chunk.start == sequence.computed
        assert chunk.last == (end == len(sequence.tokens))
        assert end <= len(sequence.pages) * PAGE
        assert self.scheduler.config.chunked_prefill_enabled or chunk.last

    # --- what always holds

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pages = self.scheduler.pages
        assert pages.free + pages.cached + pages.running + pages.reserved + pages.quarantined == pages.total
        assert set(self.published.paths) == self.pages_of(CACHE)
        self.scheduler.check()

    @invariant()
    def counters_only_grow(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler, cache = self.scheduler, self.scheduler.prefix_cache
        counters = (cache.query_tokens, cache.hit_tokens, cache.evicted_pages, scheduler.preemptions)
        assert all(now >= before for now, before in zip(counters, self.counters, strict=True))
        assert cache.hit_tokens <= cache.query_tokens
        self.counters = counters

    @invariant()
    def what_is_published_is_there(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for page, (salt, path) in self.published.paths.items():
            first = (len(path) - 1) // PAGE * PAGE
            for p in range(first, len(path)):
                assert self.memory.holds(page, p - first, (salt, path[: p + 1]))

    @invariant()
    def no_page_is_in_two_hands(self) -> None:
        """Also not in those of a writer whose lease is over, nor in those of a step that still runs."""
        if not hasattr(self, "scheduler"):
            return
        sequences = {request.sequence for request in self.requests.values()}
        sequences |= {chunk.sequence for chunk in (self.step.chunks if self.step else [])}
        held = [page for s in sequences if s.handle is not None for page in s.pages[s.handle.shared :]]
        held += [page for w in self.writing.values() for page in w.pages[w.shared :]]
        held += list(self.published.paths)
        assert len(set(held)) == len(held)
        assert len(held) <= self.scheduler.pages.total - self.scheduler.pages.free

    def pages_of(self, owner: object) -> set[int]:
        allocator = self.scheduler._pool.allocator
        return {page for page in range(allocator.total) if allocator.owner(page) == owner}

    def teardown(self) -> None:
        """Once the writers stop and the leases are over, everything comes to its end and every page can be had."""
        if not hasattr(self, "scheduler"):
            return
        for lease_id in list(self.writing):
            self.scheduler.end_write(lease_id, False, self.now)
        self.writing.clear()
        self.scheduler.expire(self.now + 2 * TTL)
        steps = 0
        while self.requests:
            self.complete()
            self.schedule()
            steps += 1
            assert steps < 20_000
        self.complete()
        assert all(request.endings == 1 for request in self.ended)
        self.at_rest()

    def at_rest(self) -> None:
        scheduler, cache = self.scheduler, self.scheduler.prefix_cache
        scheduler.check()
        assert scheduler.pages.free + scheduler.pages.cached == scheduler.pages.total
        assert (cache.pinned, scheduler.live_leases) == (0, 0)
        cache.evict(cache.evictable)
        assert scheduler.pages.free == scheduler.pages.total
        assert not cache._roots


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=60)
