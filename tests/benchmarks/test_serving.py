"""What the benchmarks of real clusters make of what their client saw. No cluster is started."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import interference
import prefix_cache
import pytest
from serving import Stream, complete, percentile


def asked(**changes: object) -> prefix_cache.Asked:
    """The second of two requests that share 1,500 of 1,600 tokens, as it should be."""
    computed = {"prefill-0": 99, "decode-0": 1}
    return replace(prefix_cache.Asked(0.1, 1500, computed, sent=99, received=99), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"cached_tokens": 1488}, "only 1488 tokens were found in the cache"),
        ({"computed": {"prefill-0": 111, "decode-0": 1}}, "were computed"),
        ({"sent": 1599, "received": 1599}, "1599 tokens were sent"),
        ({"received": 98}, "99 tokens were sent, 98 received"),
        ({"computed": {"decode-0": 100}, "sent": 0, "received": 0}, None),
    ],
)
def test_a_request_that_did_more_than_the_suffix_is_found(
    changes: dict[str, object], fault: str | None
) -> None:
    found = asked(**changes).fault(suffix=100, prompt=1600, slack=0)
    assert found is None if fault is None else fault in (found or "")


def test_a_page_more_is_no_fault_where_whole_pages_are_shared() -> None:
    found = asked(cached_tokens=1488, computed={"prefill-0": 0, "decode-0": 112}, sent=0, received=0)
    assert found.fault(suffix=100, prompt=1600, slack=15) is None
    assert found.fault(suffix=100, prompt=1600, slack=11) is not None
    assert asked(computed={"decode-0": 99}).fault(suffix=100, prompt=1600, slack=15) is not None


def test_the_ratio_of_a_target_is_that_of_its_medians() -> None:
    pairs = [
        prefix_cache.Pair("prefill_decode", asked(ttft_s=cold), asked(ttft_s=warm))
        for cold, warm in [(1.0, 0.1), (2.0, 0.3), (4.0, 0.2)]
    ]
    figures = prefix_cache.report(pairs, prefix_cache.parse([]))
    assert figures["ttft_ratio_warm_cold"] == pytest.approx(0.1)
    assert json.loads(json.dumps(figures))["prompt_tokens"] == 1600


def test_gaps_are_those_that_end_in_the_window() -> None:
    stream = Stream(sent=0.0, events=[1.0, 1.5, 2.5, 4.0])
    assert stream.ttft == 1.0
    assert stream.gaps(2.0, 4.0) == [1.0, 1.5]
    assert stream.gaps(0.0, 1.4) == []


@pytest.mark.parametrize(("values", "expected"), [(range(1, 101), 100), (range(1, 201), 199), ([7.0], 7.0)])
def test_percentile(values: Sequence[float], expected: float) -> None:
    """One in a hundred may be larger, no more."""
    assert percentile(list(reversed(values)), 0.99) == expected


def test_interference_reports_the_median_round_of_each_place() -> None:
    of = interference.Round("hybrid", 10, 20, 20, 30, 40, (100, 100), 1.0, 2.0, 100.0, 50.0)
    rounds = [replace(of, disturbed_p99_ms=ms) for ms in (30.0, 50.0, 400.0)]
    rounds += [replace(of, where="1p1d", disturbed_p99_ms=25.0)]
    figures = interference.report(rounds)
    assert figures["itl_p99_ratio_hybrid"] == 2.5
    assert figures["itl_p99_ratio_1p1d"] == 1.25
    assert figures["prompt_slowdown_hybrid"] == 2.0
    assert figures["decode_rate_kept_hybrid"] == 0.5


STREAM = [
    {"choices": [{"text": "a", "token_ids": [5]}]},
    {"choices": [{"text": "bc", "token_ids": [6, 7]}]},
    {"choices": [{"text": "", "token_ids": [], "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 3}},
]


def read(*lines: bytes, status: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Stream:
    """What the client makes of an answer over a real socket."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(status)
        for line in lines:
            writer.write(b"data: " + line + b"\n\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def ask() -> Stream:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await complete(f"http://127.0.0.1:{port}", Stream(), prompt="x", max_tokens=3)

    return asyncio.run(ask())


def test_the_client_counts_the_events_that_bring_tokens() -> None:
    stream = read(*[json.dumps(event).encode() for event in STREAM], b"[DONE]")
    assert len(stream.events) == 2
    assert stream.sent < stream.events[0] <= stream.events[1] <= stream.ended
    assert stream.usage == {"prompt_tokens": 3}


@pytest.mark.parametrize(
    ("lines", "status", "message"),
    [
        ([json.dumps(STREAM[0]).encode()], b"HTTP/1.1 200 OK\r\n\r\n", "cut off"),
        ([b'{"error": {"code": "x"}}', b"[DONE]"], b"HTTP/1.1 200 OK\r\n\r\n", "ended with"),
        ([], b"HTTP/1.1 503 Busy\r\n\r\n{}", "503"),
    ],
)
def test_what_is_not_a_whole_stream_ends_the_benchmark(
    lines: list[bytes], status: bytes, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        read(*lines, status=status)
