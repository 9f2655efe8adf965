"""What a client was sent says where to go on, whatever the chunks were."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from microserving.protocol.generation import GenerationChunk, StopParams, TokenLogprob
from microserving.router.delivery import Delivery

from .hosting import generation


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    resumed=st.integers(0, 3),
    limit=st.none() | st.integers(1, 30),
)
def test_the_ids_are_those_that_were_sent_and_no_more_than_allowed(
    sizes: list[int], resumed: int, limit: int | None
) -> None:
    total = resumed + sum(sizes)
    tokens = list(range(100, 100 + total))
    limit = None if limit is None else max(limit, resumed + 1)
    request = replace(
        generation(), resume_output_ids=tuple(tokens[:resumed]), stop=StopParams(max_tokens=limit)
    )
    delivery, sent, at = Delivery(request), [], resumed
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        taken = tuple(tokens[at : at + size])
        scores = tuple(TokenLogprob(token, -1.0) for token in taken)
        chunk = GenerationChunk("x" * size, taken, "stop" if last else None, 20, 0, logprobs=scores)
        shown = delivery.take(chunk)
        sent += shown.token_ids
        assert tuple(score.token_id for score in shown.logprobs) == shown.token_ids
        at += size
        assert delivery.output_ids == tuple(tokens[:resumed] + sent)
        assert delivery.tokens == len(sent)
        if shown.finish_reason is not None:
            assert shown.completion_tokens == resumed + len(sent)
            break
    allowed = total if limit is None else min(total, limit)
    assert resumed + len(sent) == allowed
    assert delivery.cut == (limit is not None and total > limit)
    assert shown.finish_reason == ("length" if delivery.cut else "stop")
    assert delivery.resumable


def test_text_without_ids_is_not_accounted_for() -> None:
    delivery = Delivery(generation())
    delivery.take(GenerationChunk(""))
    assert not delivery.begun
    assert delivery.resumable
    delivery.take(GenerationChunk("text"))
    assert delivery.begun
    assert not delivery.resumable


def test_what_was_held_back_may_come_with_the_end() -> None:
    delivery = Delivery(generation())
    delivery.take(GenerationChunk("a", (1,)))
    delivery.take(GenerationChunk("held", (), "length"))
    assert delivery.resumable
    assert delivery.finished
