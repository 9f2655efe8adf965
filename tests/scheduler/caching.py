"""A scheduler with a prefix cache, and short hand-made situations in it."""

from __future__ import annotations

from microserving.scheduler import (
    LeasedPages,
    LeaseState,
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
