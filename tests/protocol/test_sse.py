"""The event-stream parser against hand-written streams, split anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.errors import EngineUnavailable
from microserving.protocol.sse import DONE_DATA, DONE_EVENT, SSEParser, encode_event

STREAM = (
    "\ufeff: a comment\n"
    'data: {"a":1}\n\n'
    "event: x\r\nid: 5\r\ndata: two\r\ndata: lines\r\n\r\n"
    "data:no space\r\rdata:  one space kept\n\n"
    ":\n\n"
    "data\n\n"
    "retry: 10\n\n"
    "data: é😀\u2028still the same line\x0b\n\n"
    "data: [DONE]\n\n"
    "data: never ended"
).encode()
EVENTS = [
    '{"a":1}',
    "two\nlines",
    "no space",
    " one space kept",
    "",
    "é😀\u2028still the same line\x0b",
    "[DONE]",
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_any_split_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = SSEParser()
    events = [event for i, j in itertools.pairwise(edges) for event in parser.feed(STREAM[i:j])]
    assert events == EVENTS


def test_byte_by_byte() -> None:
    parser = SSEParser()
    assert [event for byte in STREAM for event in parser.feed(bytes([byte]))] == EVENTS


def test_what_is_encoded_is_parsed() -> None:
    assert SSEParser().feed(encode_event(b'{"x":"\\n"}') + DONE_EVENT) == ['{"x":"\\n"}', DONE_DATA]


@pytest.mark.parametrize("chunk", [b"data: " + b"x" * 60, b"data: xxxxx\n" * 12, b"data:\n" * 40, b"x" * 101])
def test_an_endless_event_is_refused(chunk: bytes) -> None:
    parser = SSEParser(max_event_bytes=100)
    with pytest.raises(EngineUnavailable):
        list(map(parser.feed, [chunk] * 3))
