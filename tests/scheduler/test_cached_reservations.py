"""Reservations and sends that find their prefix in the cache."""

from __future__ import annotations

import pytest

from microserving.errors import LeaseError
from microserving.scheduler import (
    LeaseState,
    SequenceKind,
    SequenceState,
)

from .caching import make, prompt, receive, send, serve, shape, step


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
