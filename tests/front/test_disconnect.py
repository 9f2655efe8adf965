"""Clients that leave, on real sockets: whatever ran for them ends, in every window."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from microserving.front import FrontSettings, create_front
from microserving.protocol.generation import GenerationChunk, GenerationRequest

from .fakes import ScriptedBackend, call, live, raw_request


async def silent(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    await asyncio.Event().wait()
    yield GenerationChunk("never")


async def one_then_silent(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    yield GenerationChunk("one", (1,), None, 1, 1)
    await asyncio.Event().wait()


async def endless(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    while True:
        yield GenerationChunk("x" * 1000, (1,), None, 1, 1)
        await asyncio.sleep(0)


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 30, **fields}).encode()


def reset(client: socket.socket) -> None:
    """Close with RST instead of FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@pytest.mark.case("STR-01")
@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
def test_leaving_before_the_first_token(fields: dict[str, Any], leave: Any) -> None:
    backend = ScriptedBackend(silent)
    with live(create_front(backend)) as port:
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(raw_request("/v1/completions", body(**fields)))
        assert backend.wait_active(fields.get("n", 1))
        leave(client)
        assert backend.wait_active(0)


@pytest.mark.case("STR-01")
@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("script", [one_then_silent, endless])
@pytest.mark.parametrize("n", [1, 12])
def test_leaving_in_the_middle_of_a_stream(script: Any, leave: Any, n: int) -> None:
    backend = ScriptedBackend(script)
    with live(create_front(backend, FrontSettings(max_concurrent_choices=4))) as port:
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(raw_request("/v1/completions", body(stream=True, n=n)))
        assert b"200 OK" in client.recv(1000)
        assert backend.wait_active(min(n, 4))
        leave(client)
        assert backend.wait_active(0)


@pytest.mark.case("STR-01")
def test_half_closing_is_leaving() -> None:
    backend = ScriptedBackend(one_then_silent)
    with live(create_front(backend)) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(raw_request("/v1/completions", body(stream=True)))
        assert b"200 OK" in client.recv(1000)
        client.shutdown(socket.SHUT_WR)
        assert backend.wait_active(0)


def test_a_client_that_does_not_read_holds_the_backend_back() -> None:
    made = 0

    async def counting(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        nonlocal made
        async for chunk in endless(request):
            made += 1
            yield chunk

    backend = ScriptedBackend(counting)
    with live(create_front(backend)) as port:
        slow = socket.create_connection(("127.0.0.1", port))
        slow.sendall(raw_request("/v1/completions", body(stream=True)))
        backend.wait_active(1)
        with socket.create_connection(("127.0.0.1", port)) as other:
            # Another client is served meanwhile, and closes its stream when it has seen enough.
            other.sendall(raw_request("/v1/completions", body(stream=True)))
            assert other.recv(100)
        assert backend.wait_active(1)
        slow.close()
        assert backend.wait_active(0)
    assert made < 100_000


def test_leaving_while_the_body_is_sent() -> None:
    backend = ScriptedBackend()
    with live(create_front(backend)) as port:
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(raw_request("/v1/completions", body())[:-5])
        client.close()
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(raw_request("/v1/completions", body(), headers="connection: close\r\n"))
            assert b"200 OK" in other.recv(1000)
    assert len(backend.requests) == 1


@pytest.mark.case("SC-12")
def test_a_slow_body_is_given_up() -> None:
    app = create_front(ScriptedBackend(), FrontSettings(body_timeout_s=0.05))
    with live(app) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(raw_request("/v1/completions", body())[:-5])
        answer = b"".join(iter(lambda: client.recv(1000), b""))  # until the server closes
    assert b"400 Bad Request" in answer
    assert b"connection: close" in answer


def test_cleaning_up_is_waited_for() -> None:
    """A backend may need an await to free what it holds; a new request of the same client comes after it."""
    cleaned = False

    async def careful(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        nonlocal cleaned
        try:
            async for chunk in silent(request):
                yield chunk
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    backend = ScriptedBackend(careful)
    with live(create_front(backend)) as port:
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(raw_request("/v1/completions", body()))
        assert backend.wait_active(1)
        client.close()
        assert backend.wait_active(0)
    assert cleaned


def test_many_choices_that_fail_leave_nothing() -> None:
    async def third_fails(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        if request.request_id.endswith("-2"):
            raise ValueError("broken")
        async for chunk in silent(request):
            yield chunk

    backend = ScriptedBackend(third_fails)
    response = call(create_front(backend), "POST", "/v1/completions", content=body(n=20))
    assert response.status_code == 500
    assert backend.active == 0


@pytest.mark.case("MT-03")
def test_every_request_ends_once_whatever_its_choices() -> None:
    endings: list[str] = []
    backend = ScriptedBackend()
    with live(create_front(backend, FrontSettings(on_ended=endings.append))) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        for fields in ({}, {"n": 3}, {"n": 3, "stream": True}, {"n": -1}):
            httpx.post(url, content=body(**fields))
        backend.script = silent
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(raw_request("/v1/completions", body(n=3)))
        assert backend.wait_active(3)
        client.close()
        assert backend.wait_active(0)
    assert endings == ["ok", "ok", "ok", "invalid_value", "cancelled"]
