"""What keeps a sequence waiting although there are pages: thresholds, bounds, budgets, deadlines."""

from __future__ import annotations

from microserving.scheduler import (
    Scheduler,
    Sequence,
    SequenceKind,
    SequenceState,
)

from .caching import make, prompt, receive, serve, shape, step


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
