"""What comes before, behind and instead of a request, on real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from microserving.front import create_front, http_protocol
from microserving.front.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS, BoundedHeadProtocol
from microserving.protocol.generation import GenerationChunk, GenerationRequest

from .fakes import ScriptedBackend, live, raw_request

COMPLETION = raw_request("/v1/completions", b'{"prompt":"a"}')
STREAM = raw_request("/v1/completions", b'{"prompt":"a","stream":true}')
GARBAGE = b"\x16\x03\x01 no HTTP\r\n\r\n"


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def port(backend: ScriptedBackend) -> Iterator[int]:
    with live(create_front(backend), http=BoundedHeadProtocol, ws="none") as port:
        yield port


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    client.settimeout(10)
    received = b""
    while data := client.recv(100_000):
        received += data
    return received


def exchange(port: int, *parts: bytes) -> bytes:
    """What the server answers to ``parts`` until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        for part in parts:
            client.sendall(part)
        return rest(client)


def refusal(answer: bytes, status: int) -> str:
    """The code of the error, which is the whole of ``answer``."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


def get(headers: bytes, path: bytes = b"/health") -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\nhost: test\r\n" + headers + b"\r\n"


@pytest.mark.case("SC-12")
@pytest.mark.parametrize(
    "request_bytes",
    [
        get(b"x: " + b"y" * MAX_HEAD_BYTES + b"\r\n"),
        get(b"".join(b"x%d: %s\r\n" % (i, b"y" * 1000) for i in range(70))),
        get(b"", b"/" + b"y" * MAX_HEAD_BYTES),
        get(b"x: y\r\n" * MAX_HEADERS),
        get(b"x: y\r\n" * 5000),
    ],
    ids=["long value", "70 KB", "long path", "201 fields", "5000 fields"],
)
def test_a_large_head_is_refused_though_it_comes_in_one_read(port: int, request_bytes: bytes) -> None:
    assert refusal(exchange(port, request_bytes), 431) == "request_header_fields_too_large"


def test_a_head_at_the_limits_is_served(port: int) -> None:
    close = b"connection: close\r\n"
    assert b" 200 " in exchange(port, get(close + b"x: y\r\n" * (MAX_HEADERS - 2)))
    assert b" 200 " in exchange(port, get(close + b"x: " + b"y" * (MAX_HEAD_BYTES - 200) + b"\r\n"))


def test_heads_of_one_connection_do_not_add_up(port: int) -> None:
    large = get(b"x: " + b"y" * 30_000 + b"\r\n")
    assert exchange(port, large * 5, get(b"connection: close\r\n")).count(b"HTTP/1.1 200") == 6


def test_trailers_count(port: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"
    many = exchange(port, head + b"1\r\n{\r\n0\r\n" + b"x: y\r\n" * 300)
    assert refusal(many, 431) == "request_header_fields_too_large"


def test_garbage_is_refused(port: int) -> None:
    assert refusal(exchange(port, GARBAGE), 400) == "invalid_http"


@pytest.mark.parametrize("behind", [GARBAGE, get(b"x: y\r\n" * 5000)])
def test_a_request_with_something_bad_behind_it_gets_its_answer(port: int, behind: bytes) -> None:
    answer = exchange(port, COMPLETION + behind)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in head
    assert json.loads(body)["choices"][0]["text"] == "Hello world"


def test_garbage_during_a_stream_does_not_get_into_it(backend: ScriptedBackend, port: int) -> None:
    go = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def gated(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        loops.append(asyncio.get_running_loop())
        yield GenerationChunk("one", (1,), None, 1, 1)
        await go.wait()
        yield GenerationChunk("two", (2,), "stop", 1, 2)

    backend.script = gated
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(STREAM)
        begin = client.recv(1)
        client.sendall(GARBAGE)
        # Another connection's answer: the loop has read the garbage before.
        assert b" 200 " in exchange(port, get(b"connection: close\r\n"))
        loops[0].call_soon_threadsafe(go.set)
        answer = begin + rest(client)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
@pytest.mark.parametrize("split", [False, True])
def test_an_upgrade_is_answered_as_plain_http(
    port: int, protocol: bytes, split: bool, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: " + protocol + b"\r\n"
    with caplog.at_level(logging.INFO):
        health = exchange(port, get(upgrade) + get(b"connection: close\r\n"))
        data = b'{"prompt":"a"}'
        head = raw_request("/v1/completions", data, headers=upgrade.decode())[: -len(data)]
        behind = data + COMPLETION + get(b"connection: close\r\n")
        answer = exchange(port, head, behind) if split else exchange(port, head + behind)
    assert health.count(b"HTTP/1.1 200 ") == 2
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.count(b"Hello world") == 2
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/models"])
def test_a_body_that_nobody_waits_for_does_not_keep_the_connection(
    path: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
    answer = exchange(port, raw_request(path, b"x" * 100)[:-99])
    assert answer.startswith(b"HTTP/1.1 40")


def test_the_connection_lives_on_when_such_a_body_has_come(port: int) -> None:
    head, body = raw_request("/v1/nothing", b"x")[:-1], b"x"
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head)
        assert client.recv(20).startswith(b"HTTP/1.1 404")
        client.sendall(body + get(b"connection: close\r\n"))
        assert b"HTTP/1.1 200" in rest(client)


@pytest.mark.parametrize("begin", [b"", b"GET /", b"POST /v1/completions HTTP/1.1\r\nx: "])
def test_a_slow_head_is_given_up(begin: bytes, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
    assert exchange(port, begin) == b""


def ordered_after_the_timer() -> Callable[[GenerationRequest], AsyncIterator[GenerationChunk]]:
    async def slow(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        yield GenerationChunk("one", (1,), None, 1, 1)
        await asyncio.sleep(
            0.2
        )  # of the same loop: the head's timer comes first, however slow the machine is
        yield GenerationChunk("two", (2,), "stop", 1, 2)

    return slow


def test_a_slow_next_head_does_not_cut_the_answer_before_it(
    backend: ScriptedBackend, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
    backend.script = ordered_after_the_timer()
    assert exchange(port, STREAM + b"GET /h").endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_tunnel_is_refused(port: int) -> None:
    assert refusal(exchange(port, b"CONNECT test:80 HTTP/1.1\r\nhost: test\r\n\r\n"), 400) == "invalid_http"
