"""Which chunks a step has, in hand-made situations."""

import pytest

from microserving.errors import KVExhausted, LeaseError, Overloaded, RequestConflict
from microserving.scheduler import Chunk, Scheduler, SchedulerConfig, Sequence, SequenceKind, SequenceState


def make(**changes: int) -> Scheduler:
    fields = {
        "total_pages": 16,
        "page_size": 4,
        "chunk_size_tokens": 8,
        "max_batch_size": 4,
        "max_sequences": 8,
    }
    return Scheduler(SchedulerConfig(**(fields | changes), lease_ttl_s=10.0, page_wait_s=5.0))


def prompt(name: str, tokens: int, arrival: float = 0.0) -> Sequence:
    return Sequence(name, SequenceKind.GENERATE, list(range(tokens)), arrival)


def send(name: str, tokens: int, destination: str, arrival: float = 0.0) -> Sequence:
    return Sequence(name, SequenceKind.SEND, list(range(tokens)), arrival, destination)


def step(scheduler: Scheduler) -> list[tuple[str, int, int, bool]]:
    """Run a step: every generation that may, gets a token; sends that are done end."""
    chunks = scheduler.schedule(0.0).chunks
    shape = [(c.sequence.request_id, c.start, c.length, c.last) for c in chunks]
    scheduler.complete()
    for chunk in chunks:
        after(scheduler, chunk)
    scheduler.check()
    return shape


def after(scheduler: Scheduler, chunk: Chunk) -> None:
    if chunk.last and chunk.sequence.kind is SequenceKind.SEND:
        scheduler.finish(chunk.sequence)
    elif chunk.last:
        chunk.sequence.tokens.append(0)


def test_a_long_prompt_is_cut_and_never_stops_a_decode() -> None:
    scheduler = make(chunk_size_tokens=8)
    scheduler.add(prompt("short", 3))
    assert step(scheduler) == [("short", 0, 3, True)]
    scheduler.add(prompt("long", 20))
    assert step(scheduler) == [("short", 3, 1, True), ("long", 0, 8, False)]
    assert step(scheduler) == [("short", 4, 1, True), ("long", 8, 8, False)]
    assert step(scheduler) == [("short", 5, 1, True), ("long", 16, 4, True)]
    assert step(scheduler) == [("short", 6, 1, True), ("long", 20, 1, True)]


def test_shorter_prompts_first_until_the_longer_one_has_waited() -> None:
    scheduler = make(chunk_size_tokens=4)
    scheduler.add(prompt("long", 20, arrival=0.0))
    scheduler.add(prompt("soon", 4, arrival=0.001))
    scheduler.add(prompt("late", 4, arrival=0.030))
    assert step(scheduler)[0][0] == "soon"
    assert [name for name, *_ in step(scheduler)] == ["soon", "long"]
    assert [name for name, *_ in step(scheduler)] == ["soon", "long"]


def test_max_batch_size_bounds_the_running_sequences() -> None:
    scheduler = make(max_batch_size=2)
    for name in "abc":
        scheduler.add(prompt(name, 2))
    assert [name for name, *_ in step(scheduler)] == ["a", "b"]
    assert [name for name, *_ in step(scheduler)] == ["a", "b"]
    first = scheduler.get(SequenceKind.GENERATE, "a")
    assert first is not None
    scheduler.finish(first)
    assert [name for name, *_ in step(scheduler)] == ["b", "c"]


def test_the_sends_of_a_step_share_one_destination() -> None:
    scheduler = make()
    scheduler.add(send("a", 3, "one"))
    scheduler.add(send("b", 2, "two", arrival=0.01))
    scheduler.add(send("c", 3, "one", arrival=0.02))
    assert step(scheduler) == [("a", 0, 3, True), ("c", 0, 3, True)]
    assert step(scheduler) == [("b", 0, 2, True)]
    assert scheduler.pages.free == 16


def test_a_decode_without_a_page_preempts_the_newest_which_computes_its_tokens_again() -> None:
    scheduler = make(total_pages=5, page_size=4, chunk_size_tokens=16)
    old, new = prompt("old", 7), prompt("new", 6)
    scheduler.add(old)
    step(scheduler)
    scheduler.add(new)
    step(scheduler)
    step(scheduler)  # old has 10 tokens on 3 pages, new 8 on 2
    assert (len(old.pages), len(new.pages)) == (3, 2)
    assert step(scheduler) == [("old", 9, 1, True), ("new", 7, 1, True)]
    for position in (10, 11):  # no page for new, and it is the newest: it waits
        assert step(scheduler) == [("old", position, 1, True)]
    assert step(scheduler) == [("old", 12, 1, True)]
    assert (new.state, new.pages, new.computed) == (SequenceState.WAITING, [], 0)
    assert scheduler.preemptions == 1
    assert len(new.tokens) == 9  # its output is kept
    scheduler.finish(old)
    assert step(scheduler) == [("new", 0, 9, True)]
    assert new.computed_before == 8


def test_a_prompt_that_finds_no_pages_lets_nobody_pass_it() -> None:
    scheduler = make(total_pages=6, chunk_size_tokens=64)
    scheduler.add(prompt("running", 12))
    step(scheduler)
    scheduler.add(prompt("big", 16))
    scheduler.add(prompt("small", 4, arrival=1.0))
    assert [name for name, *_ in step(scheduler)] == ["running"]
    assert scheduler.try_reserve("r", (1, 2), 1, now=0.0) is None
    waiting = scheduler.get(SequenceKind.GENERATE, "big")
    assert waiting is not None
    before = scheduler.pages_freed
    scheduler.finish(waiting)
    assert scheduler.pages_freed > before  # those who wait for pages may try again
    assert scheduler.try_reserve("r", (1, 2), 1, now=0.0) is not None


def test_the_queue_is_bounded_and_counts_leases() -> None:
    scheduler = make(max_sequences=2)
    scheduler.add(prompt("a", 2))
    assert scheduler.try_reserve("b", (1, 2), 1, now=0.0) is not None
    with pytest.raises(Overloaded) as refused:
        scheduler.add(prompt("c", 2))
    assert refused.value.retry_after_s
    assert not isinstance(refused.value, KVExhausted)
    with pytest.raises(Overloaded):
        scheduler.try_reserve("c", (1, 2), 1, now=0.0)


def test_the_waiting_are_bounded() -> None:
    scheduler = make(ingestion_queue_size=2, max_batch_size=1)
    for name in "abc":
        scheduler.add(prompt(name, 2))
        if name == "a":
            step(scheduler)
    with pytest.raises(Overloaded) as refused:
        scheduler.add(prompt("d", 2))
    assert refused.value.retry_after_s
    with pytest.raises(Overloaded):
        scheduler.try_reserve("d", (1, 2), 1, now=0.0)
    waiting = scheduler.get(SequenceKind.GENERATE, "c")
    assert waiting is not None
    scheduler.finish(waiting)
    scheduler.add(prompt("d", 2))


def test_a_live_id_is_refused() -> None:
    scheduler = make()
    scheduler.add(prompt("a", 2))
    with pytest.raises(RequestConflict):
        scheduler.add(prompt("a", 2))
    with pytest.raises(RequestConflict):
        scheduler.try_reserve("a", (1, 2), 1, now=0.0)
    scheduler.add(send("a", 2, "x"))  # a send has ids of its own


def test_a_received_sequence_computes_only_the_rest() -> None:
    scheduler = make()
    lease = scheduler.try_reserve("a", tuple(range(10)), 9, now=0.0)
    assert lease is not None
    assert len(lease.pages) == 3
    with pytest.raises(LeaseError):
        scheduler.add_received(prompt("a", 10))
    scheduler.begin_write("a", lease.lease_id, now=0.0)
    scheduler.end_write(lease.lease_id, ok=True, now=0.0)
    scheduler.add_received(prompt("a", 10))
    assert step(scheduler) == [("a", 9, 1, True)]


def test_a_fully_received_prompt_computes_its_last_token_for_the_logits() -> None:
    scheduler = make()
    lease = scheduler.try_reserve("a", tuple(range(8)), 8, now=0.0)
    assert lease is not None
    scheduler.begin_write("a", lease.lease_id, now=0.0)
    scheduler.end_write(lease.lease_id, ok=True, now=0.0)
    scheduler.add_received(prompt("a", 8))
    assert step(scheduler) == [("a", 7, 1, True)]


def test_a_sequence_that_ends_in_a_step_keeps_its_pages_until_the_step_is_over() -> None:
    scheduler = make()
    sequence = prompt("a", 6)
    scheduler.add(sequence)
    scheduler.schedule(0.0)
    scheduler.finish(sequence)
    assert scheduler.pages.running == 2
    scheduler.check()
    scheduler.complete()
    assert scheduler.pages.free == 16
    assert not list(scheduler.sequences())


@pytest.mark.case("PD-32")
def test_received_kv_waits_without_being_lost() -> None:
    scheduler = make(max_batch_size=1, chunk_size_tokens=64)
    scheduler.add(prompt("stream", 4))
    step(scheduler)
    lease = scheduler.try_reserve("x", tuple(range(8)), 7, now=0.0)
    assert lease is not None
    scheduler.begin_write("x", lease.lease_id, now=0.0)
    scheduler.end_write(lease.lease_id, ok=True, now=0.0)
    scheduler.add_received(prompt("x", 8))
    for _ in range(6):
        assert [name for name, *_ in step(scheduler)] == ["stream"]
    stream = scheduler.get(SequenceKind.GENERATE, "stream")
    assert stream is not None
    scheduler.finish(stream)
    assert step(scheduler) == [("x", 7, 1, True)]


def test_waiting_holders_do_not_block_each_other_for_ever() -> None:
    """Two received sequences hold every page, and each lacks one: the older gets the newer's."""
    scheduler = make(total_pages=4, page_size=4)
    for name in ("a", "b"):
        lease = scheduler.try_reserve(name, tuple(range(9)), 8, now=0.0)
        assert lease is not None
        scheduler.begin_write(name, lease.lease_id, now=0.0)
        scheduler.end_write(lease.lease_id, ok=True, now=0.0)
    for name in ("a", "b"):
        scheduler.add_received(prompt(name, 9))
    assert step(scheduler) == [("a", 8, 1, True)]
    assert scheduler.preemptions == 1


def test_sends_that_wait_for_leased_pages_are_given_up_one_by_one() -> None:
    scheduler = make(total_pages=4)
    assert scheduler.try_reserve("r", tuple(range(12)), 12, now=0.0) is not None
    first, second = send("a", 12, "x"), send("b", 12, "x")
    scheduler.add(first)
    scheduler.add(second)

    def given_up(now: float) -> Sequence | None:
        assert not scheduler.schedule(now)
        return scheduler.send_to_give_up(now)

    assert given_up(1.0) is None
    assert scheduler.next_deadline == 6.0
    assert given_up(5.9) is None
    assert given_up(6.0) is second
    scheduler.finish(second)
    assert given_up(6.1) is None  # the other one has its own time
    assert scheduler.next_deadline == 10.0  # the lease
    scheduler.renew("r", now=9.0)
    assert given_up(11.0) is None
    scheduler.abort_reservation("r")
    assert step(scheduler) == [("a", 0, 8, False)]
    assert scheduler.next_deadline is None


def test_a_generation_is_never_given_up() -> None:
    scheduler = make(total_pages=4)
    assert scheduler.try_reserve("r", tuple(range(12)), 12, now=0.0) is not None
    scheduler.add(prompt("a", 12))
    for now in (1.0, 9.0):
        assert not scheduler.schedule(now)
        assert scheduler.send_to_give_up(now) is None
    assert scheduler.next_deadline == 10.0
