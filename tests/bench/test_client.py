"""The streaming client: what it counts, what it calls a failure, and that it agrees with the `openai` package."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from microserving.bench.client import FailedRequestError, HttpWire, measure
from microserving.bench.measurement import Measured
from microserving.bench.targets import Program, Target
from microserving.errors import ConfigError
from microserving.testing.virtual_time import run_virtual

from .mock_server import MockServer, Plan, Transport, listening

BODY = {"model": "mock", "prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": "a"}]


class Script:
    """A wire that gives these bytes, one after another, 10 ms apart."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        for piece in self._pieces:
            await asyncio.sleep(0.01)
            yield piece


def read(*events: dict[str, Any] | str, path: str = "/completions") -> tuple[Measured, str]:
    """What is written down of a stream of these chunks, the first one after 10 ms, and its text."""
    pieces = [f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n".encode() for e in events]

    async def run() -> tuple[Measured, str]:
        record = Measured(0, 0.0)
        text = await measure(Script(*pieces), path, {}, record, asyncio.get_running_loop().time)
        return record, text

    return run_virtual(run())


def piece(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, **more}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


END = piece("", finish_reason="stop")


@pytest.mark.case("MT-07")
@pytest.mark.parametrize(
    "usage",
    [
        [{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}],
        [{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}],
        [piece("") | {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}],
    ],
)
def test_tokens_are_the_servers_own_count_wherever_it_stands(usage: list[dict[str, Any]]) -> None:
    record, text = read(piece("a"), piece("b"), END, *usage, "[DONE]")
    assert (record.prompt_tokens, record.output_tokens, record.usage) == (3, 2, True)
    assert (text, record.finish, record.error, record.disagrees) == ("ab", "stop", None, False)


def test_without_usage_the_pieces_are_counted() -> None:
    assert read(piece("a"), piece("b"), END, "[DONE]")[0].output_tokens == 2
    with_ids = read(piece("a", token_ids=[1, 2]), piece("", token_ids=[3]), END, "[DONE]")[0]
    assert (with_ids.output_tokens, len(with_ids.pieces), with_ids.usage) == (3, 2, False)


def test_a_server_that_counts_fewer_than_came_is_told_of() -> None:
    wrong = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    assert read(piece("a"), piece("b"), END, wrong, "[DONE]")[0].disagrees


@pytest.mark.case("API-41")
def test_a_chunk_without_content_is_no_first_token() -> None:
    events = [delta(role="assistant", content=""), delta(), delta(content="a"), delta(content="b")]
    record, text = read(
        *events, piece("", delta={}, finish_reason="stop"), "[DONE]", path="/chat/completions"
    )
    assert record.pieces == pytest.approx([0.03, 0.04])
    assert (record.completed, record.ended) == (pytest.approx(0.05), pytest.approx(0.06))
    assert text == "ab"


@pytest.mark.parametrize("field", ["reasoning_content", "tool_calls", "content"])
def test_reasoning_and_tool_calls_are_output(field: str) -> None:
    value: Any = [{"index": 0}] if field == "tool_calls" else "a"
    record, _ = read(delta(**{field: value}), END, "[DONE]")
    assert record.ttft == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([piece("a")], "the stream was cut off"),
        ([], "the stream was cut off"),
        (["x"], "a chunk is not JSON"),
        (["[" * 100_000], "a chunk is not JSON"),
        (["[]"], "a chunk is no object"),
        ([{"choices": 5}], "a chunk is not as OpenAI has them"),
        ([{"choices": ["a"]}], "a chunk is not as OpenAI has them"),
        ([{"choices": [], "usage": {"prompt_tokens": "many"}}], "a chunk is not as OpenAI has them"),
        ([piece("a"), {"error": {"code": "engine_unavailable", "message": "m"}}], "engine_unavailable"),
        ([{"error": "m"}], "error"),
        ([{"choices": None}, "[DONE]"], "an answer without a token"),
        ([delta(role="assistant"), "[DONE]"], "an answer without a token"),
        ([piece("a") | {"choices": [{"text": 5}]}, "[DONE]"], "a chunk is not as OpenAI has them"),
    ],
)
def test_what_is_no_whole_answer_has_failed(events: Sequence[Any], error: str) -> None:
    record, _ = read(*events)
    assert (record.error, record.ok) == (error, False)


@pytest.mark.parametrize("after", ["silence", "a broken connection"])
def test_what_comes_after_the_last_event_is_not_the_answers(after: str) -> None:
    class Wire(Script):
        async def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
            async for data in super().stream(path, body):
                yield data
            if after == "silence":
                await asyncio.sleep(600)
            raise FailedRequestError("connection: closed by the peer")

    async def run() -> tuple[Measured, float]:
        clock = asyncio.get_running_loop().time
        record = Measured(0, 0.0)
        pieces = (f"data: {json.dumps(piece('a'))}\n\n".encode(), b"data: [DONE]\n\n")
        assert await measure(Wire(*pieces), "/completions", {}, record, clock) == "a"
        return record, clock()

    record, over = run_virtual(run())
    assert (record.error, record.ended, record.output_tokens) == (None, pytest.approx(0.02), 1)
    assert over < 2


def test_a_record_survives_json() -> None:
    record, _ = read(piece("a"), piece("b"), END, "[DONE]")
    record.pieces = [0.01, 0.02]
    assert Measured.from_dict(json.loads(json.dumps(record.as_dict()))) == Measured(
        0, 0.0, sent=0.0, pieces=[0.01, 0.02], completed=0.03, ended=0.04, output_tokens=2, piece_tokens=2, finish="stop"
    )  # fmt: skip


# The `openai` package times its own stream


def shared_plans() -> Iterator[Plan]:
    for number in itertools.count():
        yield Plan(
            0.1 + number % 7 / 20, tuple(0.01 + i % 5 / 100 for i in range(20 + number % 3)), role_first=True
        )


async def timed(client: AsyncOpenAI, chat: bool) -> tuple[float, float, float, int]:
    """TTFT, TPOT, the time of the whole, and the tokens, as who uses the package would take them."""
    clock = asyncio.get_running_loop().time
    begin, marks, tokens = clock(), [], 0
    options: dict[str, Any] = {"model": "mock", "stream": True, "stream_options": {"include_usage": True}}
    if chat:
        stream = await client.chat.completions.create(messages=MESSAGES, **options)
    else:
        stream = await client.completions.create(prompt="a", **options)
    async for chunk in stream:
        choice = chunk.choices[0] if chunk.choices else None
        if choice and (choice.delta.content if chat else choice.text):
            marks.append(clock())
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    return marks[0] - begin, (marks[-1] - marks[0]) / (tokens - 1), clock() - begin, tokens


def ours(record: Measured) -> tuple[float, float, float, int]:
    assert record.error is None
    assert record.ttft_from_sent is not None
    assert record.tpot is not None
    assert record.jct_from_sent is not None
    return record.ttft_from_sent, record.tpot, record.jct_from_sent, record.output_tokens


@pytest.mark.parametrize("chat", [False, True])
def test_it_agrees_with_the_openai_package(chat: bool) -> None:
    """The same answers in virtual time, where nothing but the definitions can differ."""
    path, body = ("/chat/completions", {"messages": MESSAGES}) if chat else ("/completions", {"prompt": "a"})

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        for plan in itertools.islice(shared_plans(), 12):
            server = MockServer(itertools.repeat(plan))
            record = Measured(0, clock())
            await measure(server, path, body, record, clock)
            http = httpx.AsyncClient(transport=Transport(server), trust_env=False, verify=False)
            async with AsyncOpenAI(base_url="http://mock/v1", api_key="none", http_client=http) as client:
                assert ours(record) == pytest.approx(await timed(client, chat), rel=0.05)

    run_virtual(run())


def test_both_agree_with_the_server_over_a_real_socket() -> None:
    """Each against what the server wrote down of the very same request. A busy machine only ever adds to the times, so
    the least disturbed of seven requests counts."""

    async def run() -> tuple[list[float], list[float]]:
        server = MockServer(itertools.repeat(Plan(0.15, (0.01,) * 20)))
        clock = asyncio.get_running_loop().time
        bench, package = [], []
        async with listening(server) as url:
            wire = HttpWire(url)
            http = httpx.AsyncClient(trust_env=False, verify=False)
            async with AsyncOpenAI(base_url=url, api_key="none", http_client=http, max_retries=0) as client:
                await timed(client, False)  # it loads code and connects
                for _ in range(7):
                    record = Measured(0, clock())
                    await measure(wire, "/completions", BODY, record, clock)
                    bench.append(deviation(ours(record), server))
                    package.append(deviation(await timed(client, False), server))
            await wire.close()
        return bench, package

    def deviation(found: tuple[float, float, float, int], server: MockServer) -> float:
        """The largest of the three times, against the truth."""
        last = server.served[-1]
        ttft, tpot = last.pieces[0] - last.came, (last.pieces[-1] - last.pieces[0]) / 20
        truth = (ttft, tpot, last.ended - last.came)
        assert found[3] == last.plan.output_tokens
        return max(abs(one / true - 1) for one, true in zip(found, truth, strict=False))

    bench, package = asyncio.run(run())
    assert min(bench) < 0.02
    assert min(package) < 0.05


# HTTP


async def refused(status: int, body: bytes) -> tuple[str | None, str]:
    """What is counted, and what a user is told when it is the first request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        target = Target("t", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", api_key="k")
        record = Measured(0, 0.0)
        await measure(target.wire, "/completions", BODY, record, asyncio.get_running_loop().time)
        with pytest.raises(ConfigError) as caught:
            await target.ask("/completions", BODY)
        await target.close()
    return record.error, caught.value.message


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (503, b'{"error": {"code": "overloaded", "type": "server_error"}}', "503 overloaded", ""),
        (400, b'{"error": {"code": null, "type": "bad", "message": "What is ignore_eos?"}}', "400 bad", ": What is ignore_eos?"),
        (502, b"<html>", "502", ""),
        (500, b'"x"', "500", ""),
        (500, b'{"error": "broken"}', "500 error", ": broken"),
    ],
)  # fmt: skip
def test_a_refusal_is_named(status: int, body: bytes, error: str, words: str) -> None:
    assert asyncio.run(refused(status, body)) == (error, f"t: a first request failed: {error}{words}")


@pytest.mark.parametrize(
    ("body", "words"), [(b'{"error": {"message": "no such role"}}', "no such role"), (b"oops", "status 500")]
)
def test_a_router_that_takes_no_program(body: bytes, words: str, tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 500 No\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await writer.drain()
        writer.close()

    async def run() -> None:
        path = str(tmp_path / "s")
        async with await asyncio.start_unix_server(serve, path):
            target = Target("t", "http://x", admin=path, program=Program("p", {}, {}))
            with pytest.raises(ConfigError, match=f"t: .*{words}"):
                await target.prepare()
            await target.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "asked"),
    [("", "/v1/models"), ("/v1/", "/v1/models"), ("/openai/v1beta", "/openai/v1beta/models")],
)
def test_the_model_is_looked_up_where_the_requests_go(path: str, asked: str) -> None:
    async def run() -> list[str]:
        server = MockServer(itertools.repeat(Plan()))
        async with listening(server) as url:
            target = Target("t", url.removesuffix("/v1") + path, model="m")
            await target.connect()
            await target.close()
        return server.looked_up

    assert asyncio.run(run()) == [asked]


def test_nobody_there_and_no_answer_in_time() -> None:
    async def run() -> list[str | None]:
        clock = asyncio.get_running_loop().time
        server = MockServer(itertools.repeat(Plan(60.0)))
        records = [Measured(0, 0.0), Measured(1, 0.0)]
        async with listening(server) as url:
            slow = HttpWire(url, timeout_s=0.05)
            await measure(slow, "/completions", BODY, records[0], clock)
            await slow.close()
        gone = HttpWire(url)
        await measure(gone, "/completions", BODY, records[1], clock)
        await gone.close()
        return [record.error for record in records]

    timeout, nobody = asyncio.run(run())
    assert timeout == "timeout"
    assert nobody is not None
    assert nobody.startswith("connection: ")


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "ftp://x/v1", "http://", "http://ä/v1", "http://x:99999", "http://x:0", "http://[::1/v1",
     "http://a b/v1", "http://a..b/v1", "http://x\n/v1", "http://me:secret@x/v1", "http://x/v1?key=k", "http://x/v1#a"],
)  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a server"):
        HttpWire(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [("http://x", "http://x/v1"), ("https://x.y.:8/v1/", "https://x.y.:8/v1"), ("http://[::1]:8000/v1", "http://[::1]:8000/v1")],
)  # fmt: skip
def test_addresses(url: str, shown: str) -> None:
    assert HttpWire(url).url == shown
