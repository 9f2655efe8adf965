"""Hot routes on our own server: what a client may do to its connection, and slow readers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from microserving.front import FrontSettings, create_front
from microserving.front.http_protocol import BoundedHeadProtocol
from microserving.protocol.generation import GenerationChunk, GenerationRequest

from .fakes import ScriptedBackend, live, raw_request

BODY = b'{"prompt":"a"}'
COMPLETION = raw_request("/v1/completions", BODY)
STREAM = raw_request("/v1/completions", b'{"prompt":"a","stream":true}')
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n"


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def port(backend: ScriptedBackend) -> Iterator[int]:
    app = create_front(backend, FrontSettings(max_body_bytes=1000, body_timeout_s=0.3, write_timeout_s=0.5))
    with live(app, http=BoundedHeadProtocol, ws="none") as port:
        yield port


def connect(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(10)
    return client


def until(client: socket.socket, end: bytes, times: int = 1) -> bytes:
    received = b""
    while received.count(end) < times:
        data = client.recv(65536)
        if not data:
            break
        received += data
    return received


def test_a_body_in_pieces_chunked_or_asked_for_first(port: int) -> None:
    with connect(port) as client:
        for byte in COMPLETION:
            client.send(bytes([byte]))
        assert b'"text":"Hello world"' in until(client, b"}}")
        client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n" + BODY[:5] + b"\r\n")
        client.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY) - 5, BODY[5:]))
        assert b'"text":"Hello world"' in until(client, b"}}")
        client.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert until(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert until(client, b"}}").startswith(b"HTTP/1.1 200 OK\r\n")


def test_pipelined_requests_are_answered_in_order(port: int, backend: ScriptedBackend) -> None:
    with connect(port) as client:
        client.sendall(STREAM + COMPLETION + b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n" + COMPLETION)
        received = until(client, b"HTTP/1.1 200 OK", 4) + until(client, b"}}")
    positions = [received.index(text) for text in (b"[DONE]", b'"Hello world"', b'"status":"ok"')]
    assert positions == sorted(positions)
    assert len(backend.requests) == 3


@pytest.mark.case("SC-12")
def test_a_body_that_is_too_large_or_too_slow_ends_the_connection(port: int) -> None:
    for body in (
        b"content-length: 2000000000\r\n\r\n{",
        b"transfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b" " * 1024,
    ):
        with connect(port) as client:
            client.sendall(HEAD + body)
            refused = until(client, b"never")
            assert refused.startswith(b"HTTP/1.1 413 ")
            assert b"connection: close\r\n" in refused
    with connect(port) as client:
        client.sendall(HEAD + b"content-length: 50\r\n\r\n{")
        assert until(client, b"never").startswith(b"HTTP/1.1 400 ")


def test_http_1_0_and_connection_close_end_the_connection(port: int) -> None:
    for request in (
        COMPLETION.replace(b"HTTP/1.1", b"HTTP/1.0"),
        COMPLETION.replace(b"host: test", b"host: test\r\nconnection: close"),
    ):
        with connect(port) as client:
            client.sendall(request)
            answer = until(client, b"never")
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert answer.endswith(b"}}")


@pytest.mark.case("STR-01")
def test_the_work_for_a_client_that_left_ends(port: int, backend: ScriptedBackend) -> None:
    async def play(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        yield GenerationChunk("a", (1,))
        await asyncio.Event().wait()

    backend.script = play
    for request in (STREAM, COMPLETION):
        with connect(port) as client:
            client.sendall(request)
            assert backend.wait_active(1)
        assert backend.wait_active(0)


def test_a_client_that_does_not_read_is_cut_and_stalls_nobody(port: int, backend: ScriptedBackend) -> None:
    """Bounded buffers: the generation waits for its client (64 KiB here, and what the kernel holds)."""
    given = 0

    async def play(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        nonlocal given
        if request.prompt_token_ids == (98,):
            yield GenerationChunk("quick", (1,), "stop", 1, 1)
            return
        while True:
            given += 1
            yield GenerationChunk("x" * 10_000, (1,))
            await asyncio.sleep(0)

    backend.script = play
    slow = connect(port)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with slow:
        slow.sendall(STREAM)
        assert backend.wait_active(1)
        with connect(port) as quick:
            quick.sendall(raw_request("/v1/completions", b'{"prompt":"b"}'))
            assert b"quick" in until(quick, b"}}")
        assert backend.wait_active(0)  # cut after write_timeout_s
    assert given * 10_000 < 16 * 2**20
