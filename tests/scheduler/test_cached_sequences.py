"""Sequences that find their prefix in the cache, and what happens when pages lack, in hand-made situations."""

from __future__ import annotations

import pytest

from microserving.scheduler import (
    LeaseState,
    PageCopy,
    Sequence,
    SequenceKind,
    SequenceState,
)

from .caching import make, prompt, serve, shape, step


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
