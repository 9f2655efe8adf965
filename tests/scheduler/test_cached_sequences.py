"""Sequences and leases that find their prefix in the cache, in hand-made situations."""

from __future__ import annotations

import pytest

from microserving.errors import LeaseError
from microserving.scheduler import (
    LeasedPages,
    LeaseState,
    PageCopy,
    Scheduler,
    SchedulerConfig,
    Sequence,
    SequenceKind,
    SequenceState,
    Step,
)


def make(total_pages: int = 16, **changes: object) -> Scheduler:
    fields: dict[str, object] = {
        "page_size": 4,
        "chunk_size_tokens": 64,
        "max_batch_size": 4,
        "max_sequences": 8,
        "lease_ttl_s": 10.0,
        "page_wait_s": 5.0,
        "prefix_cache": "radix",
    }
    return Scheduler(SchedulerConfig(total_pages, **(fields | changes)))  # type: ignore[arg-type]


def prompt(name: str, tokens: int, salt: str = "", first: int = 0) -> Sequence:
    return Sequence(name, SequenceKind.GENERATE, list(range(first, first + tokens)), 0.0, salt=salt)


def send(name: str, tokens: int, destination: str = "x") -> Sequence:
    return Sequence(name, SequenceKind.SEND, list(range(tokens)), 0.0, destination)


def step(scheduler: Scheduler) -> Step:
    """Run one: generations get the token 1000 + position, sends that are done end."""
    done = scheduler.schedule(0.0)
    scheduler.complete()
    for chunk in done.chunks:
        if chunk.last and chunk.sequence.kind is SequenceKind.SEND:
            scheduler.finish(chunk.sequence)
        elif chunk.last and chunk.sequence.state is not SequenceState.FINISHED:
            chunk.sequence.tokens.append(1000 + len(chunk.sequence.tokens))
    scheduler.check()
    return done


def shape(done: Step) -> list[tuple[str, int, int, int]]:
    return [(c.sequence.request_id, c.cached_from, c.start, c.length) for c in done.chunks]


def serve(scheduler: Scheduler, sequence: Sequence, steps: int = 1) -> None:
    scheduler.add(sequence)
    for _ in range(steps):
        step(scheduler)
    scheduler.finish(sequence)
    scheduler.check()


def receive(scheduler: Scheduler, name: str, tokens: int, end: int) -> LeasedPages:
    lease = scheduler.try_reserve(name, tuple(range(tokens)), end, now=0.0)
    assert lease is not None
    if lease.state is LeaseState.ISSUED:
        assert scheduler.begin_write(name, lease.lease_id, now=0.0)
        assert scheduler.end_write(lease.lease_id, ok=True, now=0.0) is lease
    return lease


def test_a_second_request_computes_only_what_is_new() -> None:
    scheduler = make()
    serve(scheduler, prompt("a", 10), steps=3)  # 10 + 2 tokens computed
    assert (scheduler.pages.cached, scheduler.prefix_cache.evictable) == (3, 3)
    assert scheduler.match_prefix("", [*range(10), 1010, 1011, 5]) == 12
    again = prompt("b", 14)
    scheduler.add(again)
    done = scheduler.schedule(0.0)
    assert shape(done) == [("b", 0, 10, 4)]
    source = done.copies[0].source_page
    assert done.copies == [PageCopy(source, again.pages[2], 2)]
    assert source not in again.pages
    assert again.cached_tokens == 10
    assert (scheduler.prefix_cache.query_tokens, scheduler.prefix_cache.hit_tokens) == (9 + 13, 10)
    assert (scheduler.pages.running, scheduler.prefix_cache.pinned) == (2, 3)
    scheduler.complete()
    assert (scheduler.pages.running, scheduler.prefix_cache.pinned) == (1, 3)  # its whole pages are published


@pytest.mark.case("PX-15")
@pytest.mark.parametrize("tokens", [8, 9, 11, 12])
def test_the_same_prompt_again_computes_its_last_token(tokens: int) -> None:
    scheduler = make()
    serve(scheduler, prompt("a", tokens))
    for name in "bc":
        again = prompt(name, tokens)
        scheduler.add(again)
        done = scheduler.schedule(0.0)
        assert shape(done) == [(name, 0, tokens - 1, 1)]
        assert done.chunks[0].last
        scheduler.complete()
        scheduler.finish(again)
        scheduler.check()


@pytest.mark.case("PX-07")
def test_salts_share_nothing() -> None:
    scheduler = make()
    serve(scheduler, prompt("a", 10, salt="one"))
    scheduler.add(prompt("b", 10, salt="two"))
    assert shape(step(scheduler)) == [("b", 0, 0, 10)]
    assert scheduler.prefix_cache.hit_tokens == 0


def test_prompts_are_shared_while_they_still_run() -> None:
    scheduler = make()
    first, second = prompt("a", 10), prompt("b", 12)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    assert shape(step(scheduler)) == [("a", 10, 10, 1), ("b", 0, 8, 4)]
    assert first.pages[:2] == second.pages[:2]
    scheduler.finish(first)
    assert scheduler.prefix_cache.pinned >= 2
    scheduler.finish(second)
    assert scheduler.prefix_cache.pinned == 0


def test_prompts_that_were_computed_twice_at_once_are_kept_once() -> None:
    scheduler = make()
    first, second = prompt("a", 9), prompt("b", 9)
    scheduler.add(first)
    scheduler.add(second)
    assert shape(step(scheduler)) == [("a", 0, 0, 9), ("b", 0, 0, 9)]
    assert first.pages[:2] == second.pages[:2]
    assert (scheduler.pages.cached, scheduler.pages.running) == (2, 2)


def test_a_failed_step_publishes_nothing() -> None:
    scheduler = make()
    sequence = prompt("a", 9)
    scheduler.add(sequence)
    scheduler.schedule(0.0)
    scheduler.complete(ok=False)
    scheduler.finish(sequence, publish=False)
    assert (scheduler.pages.free, scheduler.pages.cached) == (16, 0)


def test_what_did_not_get_what_it_should_is_not_published() -> None:
    scheduler = make()
    bad, good = prompt("bad", 9), prompt("good", 9, first=50)
    scheduler.add(bad)
    scheduler.add(good)
    scheduler.schedule(0.0)
    scheduler.complete(bad=[bad])
    assert (scheduler.match_prefix("", bad.tokens), scheduler.match_prefix("", good.tokens)) == (0, 8)
    scheduler.finish(bad, publish=False)
    assert scheduler.match_prefix("", bad.tokens) == 0


@pytest.mark.case("PX-09")
def test_failures_after_a_match_leave_no_pins() -> None:
    scheduler = make()
    serve(scheduler, prompt("a", 9))
    for n in range(100):
        sequence = prompt(f"r{n}", 14)
        scheduler.add(sequence)
        scheduler.schedule(0.0)
        if n % 2:
            scheduler.finish(sequence)
        scheduler.complete(ok=False)
        if not n % 2:
            scheduler.finish(sequence, publish=False)
        scheduler.check()
    assert (scheduler.prefix_cache.pinned, scheduler.pages.cached, scheduler.pages.running) == (0, 3, 0)


@pytest.mark.case("PX-09")
def test_what_a_stream_uses_is_never_evicted() -> None:
    scheduler = make(total_pages=8)
    stream = prompt("stream", 8)
    scheduler.add(stream)
    step(scheduler)
    for n in range(50):
        serve(scheduler, prompt(f"r{n}", 15, first=100 * n))
        assert scheduler.match_prefix("", range(8)) == 8
        stream.tokens[9:] = []  # it stays as long as it is
        stream.computed = 8
    assert scheduler.prefix_cache.evicted_pages >= 49 * 3
    scheduler.finish(stream)
    scheduler.check()


def test_what_is_cached_makes_a_prompt_short() -> None:
    scheduler = make(chunk_size_tokens=16)
    serve(scheduler, prompt("a", 16))
    scheduler.add(prompt("short", 6, first=100))
    scheduler.add(prompt("cached", 18))
    assert shape(step(scheduler)) == [("cached", 0, 16, 2), ("short", 0, 0, 6)]


# --- reservations ------------------------------------------------------------------------------------------------


def test_a_lease_begins_where_the_cache_ends() -> None:
    scheduler = make()
    serve(scheduler, prompt("a", 10))
    lease = scheduler.try_reserve("r", tuple(range(14)), 13, now=0.0)
    assert lease is not None
    assert (lease.begin, lease.end, lease.shared, len(lease.pages)) == (10, 13, 2, 4)
    assert [(c.target_page, c.tokens) for c in lease.copies] == [(lease.pages[2], 2)]
    assert (scheduler.pages.reserved, lease.state) == (2, LeaseState.ISSUED)


@pytest.mark.case("PD-28")
def test_a_full_hit_needs_no_send_and_is_pinned_until_it_is_used() -> None:
    scheduler = make(total_pages=8)
    serve(scheduler, prompt("a", 13))
    lease = scheduler.try_reserve("r", tuple(range(13)), 12, now=0.0)
    assert lease is not None
    assert (lease.begin, lease.state, lease.shared, scheduler.pages.reserved) == (
        12,
        LeaseState.ARRIVED,
        3,
        0,
    )
    serve(scheduler, prompt("flood", 18, first=100))  # evicts all it can
    scheduler.add_received(prompt("r", 13))
    assert shape(step(scheduler)) == [("r", 12, 12, 1)]


@pytest.mark.case("PD-28")
@pytest.mark.parametrize("tokens", [8, 12])
def test_a_full_hit_of_a_whole_prompt_leaves_the_last_page_unshared(tokens: int) -> None:
    scheduler = make()
    serve(scheduler, prompt("a", tokens))
    lease = scheduler.try_reserve("r", tuple(range(tokens)), tokens, now=0.0)
    assert lease is not None
    assert (lease.begin, lease.state, lease.shared) == (tokens, LeaseState.ARRIVED, tokens // 4 - 1)
    assert [copy.tokens for copy in lease.copies] == [4]
    again = prompt("r", tokens)
    scheduler.add_received(again)
    assert again.handle is not None
    assert again.handle.shared == tokens // 4 - 1
    assert shape(step(scheduler)) == [("r", tokens - 1, tokens - 1, 1)]


@pytest.mark.case("PD-29")
def test_what_is_cached_beyond_the_split_is_used() -> None:
    scheduler = make()
    serve(scheduler, prompt("a", 13))
    lease = scheduler.try_reserve("r", tuple(range(13)), 2, now=0.0)
    assert lease is not None
    assert (lease.begin, lease.end, lease.state) == (2, 2, LeaseState.ARRIVED)
    cache = scheduler.prefix_cache
    before = (cache.query_tokens, cache.hit_tokens)
    scheduler.add_received(prompt("r", 13))
    assert (cache.query_tokens - before[0], cache.hit_tokens - before[1]) == (10, 10)
    assert shape(step(scheduler)) == [("r", 12, 12, 1)]
    assert scheduler.pages.running == 1


def test_received_kv_is_published_when_it_is_used_and_not_before() -> None:
    scheduler = make()
    lease = scheduler.try_reserve("r", tuple(range(13)), 12, now=0.0)
    assert lease is not None
    assert scheduler.match_prefix("", range(13)) == 0
    scheduler.begin_write("r", lease.lease_id, now=0.0)
    assert scheduler.match_prefix("", range(13)) == 0
    scheduler.end_write(lease.lease_id, ok=True, now=0.0)
    assert scheduler.match_prefix("", range(13)) == 0
    scheduler.add_received(prompt("r", 13))
    assert scheduler.match_prefix("", range(13)) == 12


@pytest.mark.case("PD-05")
@pytest.mark.parametrize("how", ["failed", "expired", "aborted"])
def test_a_lease_that_ends_badly_is_never_published(how: str) -> None:
    scheduler = make()
    lease = scheduler.try_reserve("r", tuple(range(13)), 12, now=0.0)
    assert lease is not None
    scheduler.begin_write("r", lease.lease_id, now=0.0)
    if how == "expired":
        scheduler.expire(10.0)
    elif how == "aborted":
        scheduler.abort_reservation("r")
    assert scheduler.pages.quarantined == (0 if how == "failed" else 3)
    assert scheduler.take_revoked() == ([] if how == "failed" else [lease.lease_id])
    scheduler.end_write(lease.lease_id, ok=how != "failed", now=10.0)
    assert (scheduler.pages.free, scheduler.match_prefix("", range(13))) == (16, 0)
    with pytest.raises(LeaseError):
        scheduler.commit("r", now=10.0)


@pytest.mark.case("PD-03")
def test_a_quarantined_lease_lets_go_of_what_it_shared() -> None:
    scheduler = make()
    serve(scheduler, prompt("a", 8))
    lease = scheduler.try_reserve("r", tuple(range(13)), 12, now=0.0)
    assert lease is not None
    scheduler.begin_write("r", lease.lease_id, now=0.0)
    scheduler.expire(10.0)
    assert (scheduler.pages.quarantined, scheduler.prefix_cache.pinned) == (1, 0)
    scheduler.check()
    scheduler.end_write(lease.lease_id, ok=True, now=30.0)
    assert (scheduler.pages.quarantined, scheduler.pages.free) == (0, 14)
    scheduler.check()


@pytest.mark.case("PD-26")
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("warm", [False, True])
def test_short_prompts_and_windows_of_nothing(tokens: int, warm: bool) -> None:
    scheduler = make()
    if warm:
        serve(scheduler, prompt("a", tokens))
    for name, end in (("none", 0), ("most", tokens - 1), ("all", tokens)):
        receive(scheduler, name, tokens, end)
        scheduler.add_received(prompt(name, tokens))
        done = step(scheduler)
        assert done.chunks[-1].sequence.request_id == name
        assert done.chunks[-1].last
        assert done.chunks[-1].start == (tokens - 1 if warm or end >= tokens - 1 else 0)
        finished = scheduler.get(SequenceKind.GENERATE, name)
        assert finished is not None
        scheduler.finish(finished)
        if not warm:
            scheduler.prefix_cache.evict(scheduler.prefix_cache.evictable)


@pytest.mark.case("PD-09")
def test_what_was_received_goes_back_when_it_is_aborted_before_it_ran() -> None:
    scheduler = make(max_batch_size=1)
    scheduler.add(prompt("stream", 4, first=100))
    step(scheduler)
    receive(scheduler, "r", 13, 12)
    waiting = prompt("r", 13)
    scheduler.add_received(waiting)
    step(scheduler)
    assert waiting.state is SequenceState.WAITING
    scheduler.finish(waiting)
    assert (scheduler.pages.reserved, scheduler.prefix_cache.evictable) == (0, 3)
    receive(scheduler, "s", 13, 12)
    scheduler.abort_reservation("s")
    scheduler.check()
    assert scheduler.pages.reserved == 0


@pytest.mark.parametrize("end", [5, 8, 13])
def test_the_commit_verb_puts_a_prefix_into_the_cache(end: int) -> None:
    scheduler = make()
    receive(scheduler, "r", 13, end)
    assert scheduler.commit("r", now=1.0) == end
    assert (scheduler.match_prefix("", range(20)), scheduler.live_leases) == (end, 0)
    assert (scheduler.pages.reserved, scheduler.prefix_cache.pinned) == (0, 0)
    assert scheduler.pages.cached == -(-end // 4)
    scheduler.check()
    with pytest.raises(LeaseError, match="unknown"):
        scheduler.commit("r", now=1.0)


def test_a_commit_before_the_kv_arrived_is_refused() -> None:
    scheduler = make()
    lease = scheduler.try_reserve("r", tuple(range(13)), 12, now=0.0)
    assert lease is not None
    with pytest.raises(LeaseError, match="not arrived"):
        scheduler.commit("r", now=0.0)
    scheduler.begin_write("r", lease.lease_id, now=0.0)
    with pytest.raises(LeaseError, match="not arrived"):
        scheduler.commit("r", now=0.0)
    assert scheduler.reservation("r") is lease


def test_committing_what_is_there_already_frees_the_duplicates() -> None:
    scheduler = make()
    first = receive(scheduler, "a", 10, 10)
    second = receive(scheduler, "b", 10, 10)
    assert (first.begin, second.begin) == (0, 0)
    scheduler.commit("a", now=0.0)
    scheduler.commit("b", now=0.0)
    assert (scheduler.pages.cached, scheduler.pages.free) == (3, 13)
    scheduler.check()


# --- sends -------------------------------------------------------------------------------------------------------


def test_a_send_says_which_of_its_positions_were_cached() -> None:
    scheduler = make(chunk_size_tokens=4)
    scheduler.add(send("a", 8))
    assert shape(step(scheduler)) + shape(step(scheduler)) == [("a", 0, 0, 4), ("a", 4, 4, 4)]
    scheduler.add(send("b", 14))
    assert shape(step(scheduler)) == [("b", 0, 8, 4)]
    assert shape(step(scheduler)) == [("b", 12, 12, 2)]


def test_a_send_of_what_is_all_cached_computes_nothing() -> None:
    scheduler = make()
    scheduler.add(send("a", 8))
    step(scheduler)
    scheduler.add(send("b", 8))
    done = step(scheduler)
    assert (shape(done), done.chunks[0].last, done.copies) == ([("b", 0, 8, 0)], True, [])
    assert scheduler.prefix_cache.pinned == 0


# --- pages that lack ---------------------------------------------------------------------------------------------


def test_cached_pages_are_evicted_for_those_who_need_them() -> None:
    scheduler = make(total_pages=4)
    serve(scheduler, prompt("a", 15))
    assert scheduler.pages.free == 0
    scheduler.add(prompt("b", 15, first=100))
    assert shape(step(scheduler)) == [("b", 0, 0, 15)]
    assert scheduler.prefix_cache.evicted_pages == 4


def test_a_request_that_just_fits_is_not_kept_from_its_pages_by_its_own_match() -> None:
    """The page to copy from would be one page too many."""
    scheduler = make(total_pages=4)
    serve(scheduler, prompt("a", 6))
    again = Sequence("b", SequenceKind.GENERATE, [*range(6), *range(90, 100)], 0.0)
    scheduler.add(again)
    done = step(scheduler)
    assert (shape(done), done.copies) == ([("b", 0, 4, 12)], [])


def test_a_preempted_sequence_finds_what_it_computed() -> None:
    scheduler = make(total_pages=5)
    old, new = prompt("old", 7), prompt("new", 6, first=50)
    scheduler.add(old)
    step(scheduler)
    scheduler.add(new)
    while not scheduler.preemptions:
        step(scheduler)
    assert (new.state, new.computed, new.pages) == (SequenceState.WAITING, 0, [])
    assert scheduler.match_prefix("", new.tokens) > 0
    scheduler.finish(old)
    done = step(scheduler)
    assert done.chunks[0].sequence is new
    assert done.chunks[0].start >= 4


def test_who_shares_all_its_pages_is_no_help_when_preempted() -> None:
    """The newest holder pins only what the oldest pins too: the search for a page goes on to the next one."""
    scheduler = make(total_pages=5)
    old = prompt("old", 8)
    scheduler.add(old)
    step(scheduler)
    middle = prompt("middle", 7, first=50)
    scheduler.add(middle)
    step(scheduler)  # old has 3 pages, middle 2
    lease = scheduler.try_reserve("r", tuple(range(9)), 8, now=0.0)
    assert lease is not None
    assert lease.state is LeaseState.ARRIVED
    received = prompt("r", 9)
    scheduler.add_received(received)
    while not scheduler.preemptions:
        step(scheduler)
    assert received.state is SequenceState.WAITING
    assert old.state is SequenceState.DECODE
    for _ in range(8):
        step(scheduler)
    assert middle.state is SequenceState.WAITING


def test_two_sequences_do_not_preempt_each_other_in_turn() -> None:
    """Either alone needs the whole pool: the newer one gives way, and again each time it had room for a while."""
    scheduler = make(total_pages=6)
    for name, first in (("old", 0), ("new", 50)):
        scheduler.add(prompt(name, 4, first=first))
    ended = []
    for _ in range(60):
        done = step(scheduler)
        for chunk in done.chunks:
            if len(chunk.sequence.tokens) == 24:
                scheduler.finish(chunk.sequence)
                ended.append(chunk.sequence.request_id)
    assert ended == ["old", "new"]
    assert scheduler.preemptions <= 2


# --- limits ------------------------------------------------------------------------------------------------------


def test_memory_threshold_keeps_pages_back_while_others_run() -> None:
    scheduler = make(total_pages=10, memory_threshold=0.8)
    first, second = prompt("a", 20), prompt("b", 16, first=100)
    scheduler.add(first)
    assert shape(step(scheduler)) == [("a", 0, 0, 20)]
    scheduler.add(second)  # 5 + 4 pages would be 90 %
    assert shape(step(scheduler)) == [("a", 20, 20, 1)]
    assert scheduler.try_reserve("r", tuple(range(200, 216)), 16, now=0.0) is None
    scheduler.finish(first)
    assert shape(step(scheduler)) == [("b", 0, 0, 16)]


def test_memory_threshold_never_keeps_out_who_is_alone() -> None:
    scheduler = make(total_pages=10, memory_threshold=0.1)
    lease = scheduler.try_reserve("r", tuple(range(40)), 39, now=0.0)
    assert lease is not None
    assert scheduler.try_reserve("s", (1, 2), 1, now=0.0) is None
    scheduler.abort_reservation("r")
    serve(scheduler, prompt("a", 40))


def test_max_concurrent_prefills() -> None:
    scheduler = make(max_concurrent_prefills=1, chunk_size_tokens=4)
    scheduler.add(prompt("a", 6))
    scheduler.add(prompt("b", 6, first=50))
    assert [name for name, *_ in shape(step(scheduler))] == ["a"]
    assert [name for name, *_ in shape(step(scheduler))] == ["a"]
    assert [name for name, *_ in shape(step(scheduler))] == ["a", "b"]


def test_what_was_received_waits_for_no_other_prompt() -> None:
    scheduler = make(max_concurrent_prefills=1, chunk_size_tokens=4)
    scheduler.add(prompt("long", 30, first=100))
    assert [name for name, *_ in shape(step(scheduler))] == ["long"]
    receive(scheduler, "r", 9, end=8)
    scheduler.add_received(prompt("r", 9))
    scheduler.add(prompt("short", 1, first=50))
    assert shape(step(scheduler)) == [("r", 8, 8, 1), ("long", 4, 4, 3)]
    assert [name for name, *_ in shape(step(scheduler))] == ["r", "long"]


def test_a_step_without_prefills_lets_nobody_pass_who_wants_pages() -> None:
    scheduler = make(total_pages=4)
    scheduler.add(prompt("a", 5))
    step(scheduler)
    scheduler.add(prompt("b", 12, first=50))  # needs three pages, and one is for the decode
    assert [name for name, *_ in shape(step(scheduler))] == ["a"]
    assert scheduler.try_reserve("r", (90, 91), 1, now=0.0) is None
    assert [chunk.sequence.request_id for chunk in scheduler.schedule(0.0, 0).chunks] == ["a"]
    scheduler.complete()
    assert scheduler.try_reserve("r", (90, 91), 1, now=0.0) is None


def test_without_chunks_a_prompt_is_computed_in_one() -> None:
    scheduler = make(chunked_prefill_enabled=False, chunk_size_tokens=8)
    scheduler.add(prompt("a", 3))
    scheduler.add(prompt("b", 5, first=50))
    scheduler.add(prompt("long", 20, first=100))
    assert shape(step(scheduler)) == [("a", 0, 0, 3), ("b", 0, 0, 5)]
    assert shape(step(scheduler))[2:] == [("long", 0, 0, 20)]


def test_the_prefill_budget_counts_only_in_steps_with_decodes() -> None:
    scheduler = make(chunk_size_tokens=8)
    scheduler.add(prompt("long", 26))
    for start in (0, 8):
        assert shape_of_prefills(scheduler, budget=2) == [("long", start, 8)]
    scheduler.add(prompt("short", 1, first=90))
    assert shape_of_prefills(scheduler, budget=2) == [("short", 0, 1), ("long", 16, 7)]
    assert shape_of_prefills(scheduler, budget=2) == [("long", 23, 2)]
    assert shape_of_prefills(scheduler, budget=0) == []
    assert shape_of_prefills(scheduler, budget=1) == [("long", 25, 1)]


def shape_of_prefills(scheduler: Scheduler, budget: int) -> list[tuple[str, int, int]]:
    done = scheduler.schedule(0.0, budget)
    scheduler.complete()
    for chunk in done.chunks:
        if chunk.last:
            chunk.sequence.tokens.append(7)
    return [(c.sequence.request_id, c.start, c.length) for c in done.chunks if not c.decode]


def test_deadlines() -> None:
    scheduler = make(total_pages=4)
    scheduler.add(prompt("a", 14))
    step(scheduler)
    late = prompt("late", 6, first=50)
    late.deadline = 3.0
    scheduler.add(late)
    assert (scheduler.next_deadline, scheduler.expired_sequences(2.9)) == (3.0, [])
    assert scheduler.expired_sequences(3.0) == [late]
    scheduler.finish(late)
    assert scheduler.next_deadline is None


def test_who_is_late_is_not_started() -> None:
    scheduler = make()
    late = prompt("late", 6)
    late.deadline = 3.0
    scheduler.add(late)
    assert not scheduler.schedule(3.0)
    assert late.state is SequenceState.WAITING


def test_a_resumed_generation_keeps_the_length_of_its_prompt() -> None:
    sequence = Sequence("a", SequenceKind.GENERATE, list(range(9)), 0.0, prompt_length=6)
    assert (sequence.prompt_length, sequence.remaining) == (6, 9)
