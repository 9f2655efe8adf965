"""Everything that can happen to a scheduler, in any order: the books balance and every request ends exactly once."""

from __future__ import annotations

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
    SequenceState,
)

PAGE = 4
TTL = 10.0


class Request:
    """What the test knows of a sequence: how much output it shall have, and how often it ended."""

    def __init__(self, sequence: Sequence, target: int) -> None:
        self.sequence = sequence
        self.target = target
        self.endings = 0


class SchedulerMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    writers = Bundle("writers")

    @initialize(
        total=st.integers(3, 12),
        chunk=st.integers(1, 12),
        batch=st.integers(1, 4),
        sequences=st.integers(1, 8),
    )
    def start(self, total: int, chunk: int, batch: int, sequences: int) -> None:
        self.scheduler = Scheduler(SchedulerConfig(total, PAGE, chunk, batch, sequences, TTL, TTL / 2))
        self.now = 0.0
        self.count = 0
        self.requests: dict[tuple[SequenceKind, str], Request] = {}
        self.ended: list[Request] = []
        self.batch: list[Chunk] | None = None
        self.writing: dict[int, LeasedPages] = {}
        self.max_tokens = total * PAGE

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def shape(self, prompt: int, output: int) -> tuple[int, int]:
        """Prompt and output lengths that the pool can hold."""
        prompt = 1 + prompt % (self.max_tokens - 1)
        return prompt, 1 + output % (self.max_tokens - prompt)

    # --- reservations

    @rule(target=leases, prompt=st.integers(0, 60), split=st.floats(0, 1))
    def prepare(self, prompt: int, split: float) -> object:
        prompt, _ = self.shape(prompt, 0)
        tokens = tuple(range(prompt))
        try:
            lease = self.scheduler.try_reserve(self.name(), tokens, int(split * prompt), self.now)
        except Overloaded:
            return multiple()
        if lease is None:
            return multiple()
        assert len(lease.pages) == -(-lease.end // PAGE)
        return lease

    @rule(target=writers, lease=leases)
    def begin(self, lease: LeasedPages) -> object:
        granted = self.scheduler.begin_write(lease.request_id, lease.lease_id, self.now)
        assert not granted or lease.state is LeaseState.WRITING
        if granted:
            self.writing[lease.lease_id] = lease
        return lease if granted else multiple()

    @rule(lease=consumes(writers), ok=st.booleans())
    def end(self, lease: LeasedPages, ok: bool) -> None:
        arrived = self.scheduler.end_write(lease.lease_id, ok, self.now)
        del self.writing[lease.lease_id]
        assert (arrived is lease) == (lease.state is LeaseState.ARRIVED)
        assert ok or arrived is None

    @rule(lease=leases, output=st.integers(0, 20))
    def commit(self, lease: LeasedPages, output: int) -> None:
        _, output = self.shape(len(lease.prompt) - 1, output)
        sequence = Sequence(lease.request_id, SequenceKind.GENERATE, list(lease.prompt), self.now)
        state = lease.state
        try:
            self.scheduler.add_received(sequence)
        except (LeaseError, RequestConflict):
            assert state is not LeaseState.ARRIVED
            return
        assert state is LeaseState.ARRIVED
        self.requests[sequence.key] = Request(sequence, output)

    @rule(lease=leases)
    def abort_lease(self, lease: LeasedPages) -> None:
        live = lease.state in (LeaseState.ISSUED, LeaseState.WRITING, LeaseState.ARRIVED)
        assert self.scheduler.abort_reservation(lease.request_id) == live

    @rule(lease=leases)
    def renew(self, lease: LeasedPages) -> None:
        live = lease.state in (LeaseState.ISSUED, LeaseState.WRITING, LeaseState.ARRIVED)
        if live:
            assert self.scheduler.renew(lease.request_id, self.now) == lease.expires_at == self.now + TTL
        else:
            with pytest.raises(LeaseError):
                self.scheduler.renew(lease.request_id, self.now)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.scheduler.expire(self.now):
            assert lease.expires_at <= self.now

    # --- sequences

    @rule(prompt=st.integers(0, 60), output=st.integers(0, 20))
    def submit(self, prompt: int, output: int) -> None:
        prompt, output = self.shape(prompt, output)
        self.add(Sequence(self.name(), SequenceKind.GENERATE, list(range(prompt)), self.now), output)

    @rule(prompt=st.integers(0, 60), destination=st.sampled_from("xy"))
    def submit_send(self, prompt: int, destination: str) -> None:
        prompt, _ = self.shape(prompt, 0)
        self.add(Sequence(self.name(), SequenceKind.SEND, list(range(prompt)), self.now, destination), 0)

    def add(self, sequence: Sequence, target: int) -> None:
        try:
            self.scheduler.add(sequence)
        except Overloaded:
            return
        self.requests[sequence.key] = Request(sequence, target)

    @rule(pick=st.integers(0, 100))
    def abort(self, pick: int) -> None:
        if self.requests:
            self.finish(list(self.requests.values())[pick % len(self.requests)])

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request.sequence)
        del self.requests[request.sequence.key]
        request.endings += 1
        self.ended.append(request)

    # --- steps

    @rule()
    def schedule(self) -> None:
        if self.batch is None:
            self.batch = self.scheduler.schedule(self.now).chunks
            self.check_batch(self.batch)
            if not self.batch:
                self.give_up()

    def give_up(self) -> None:
        sequence = self.scheduler.send_to_give_up(self.now)
        if sequence is not None:
            assert sequence.kind is SequenceKind.SEND
            pages = self.scheduler.pages
            assert pages.reserved or pages.quarantined, "nothing but leases may cost a send its life"
            self.finish(self.requests[sequence.key])

    @rule()
    def complete(self) -> None:
        if self.batch is None:
            return
        chunks, self.batch = self.batch, None
        self.scheduler.complete()
        for chunk in chunks:
            request = self.requests.get(chunk.sequence.key)
            if request is None or request.sequence is not chunk.sequence or not chunk.last:
                continue
            produced = len(chunk.sequence.tokens) - chunk.sequence.prompt_length + 1
            if chunk.sequence.kind is SequenceKind.SEND or produced == request.target:
                self.finish(request)
            else:
                chunk.sequence.tokens.append(0)

    def check_batch(self, chunks: list[Chunk]) -> None:
        config = self.scheduler.config
        assert len(chunks) <= config.max_batch_size
        assert sum(c.length for c in chunks if not c.decode) <= config.chunk_size_tokens
        assert len({c.sequence.destination for c in chunks if c.sequence.kind is SequenceKind.SEND}) <= 1
        assert len({id(c.sequence) for c in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.length > 0
            assert chunk.start == chunk.sequence.computed
            assert chunk.last == (chunk.start + chunk.length == len(chunk.sequence.tokens))
            assert chunk.start + chunk.length <= len(chunk.sequence.pages) * PAGE
            assert chunk.sequence.state is not SequenceState.WAITING
        pages = self.scheduler.pages
        if self.requests and not pages.reserved and not pages.quarantined:
            assert chunks, "only leases may keep the engine from going on"

    # --- what always holds

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pages = self.scheduler.pages
        assert pages.free + pages.cached + pages.running + pages.reserved + pages.quarantined == pages.total
        self.scheduler.check()

    @invariant()
    def no_page_is_in_two_hands(self) -> None:
        """Also not in those of a writer whose lease is over, nor in those of a step that still runs."""
        if not hasattr(self, "scheduler"):
            return
        held = [page for request in self.requests.values() for page in request.sequence.pages]
        running = {chunk.sequence for chunk in self.batch or ()}
        held += [page for s in running if s.state is SequenceState.FINISHED for page in s.pages]
        held += [page for lease in self.writing.values() for page in lease.pages]
        assert len(set(held)) == len(held)
        assert len(held) <= self.scheduler.pages.total - self.scheduler.pages.free

    def teardown(self) -> None:
        """Once the writers stop and the leases are over, everything comes to its end and every page is free."""
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
        assert self.scheduler.pages.free == self.scheduler.pages.total
        self.scheduler.check()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
