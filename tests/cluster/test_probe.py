"""When a child counts as ready."""

from __future__ import annotations

import asyncio

import pytest

from microserving.cluster.addresses import Address
from microserving.cluster.processes import probe_ready


def probe(answer: bytes | None, host: str = "127.0.0.1") -> tuple[bool, bytes]:
    """Probe a server that sends ``answer`` (None: nobody listens); also the request line that it got."""
    asked = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked = (await reader.readuntil(b"\r\n\r\n")).splitlines()[0]
        writer.write(answer or b"")
        writer.close()

    async def run() -> bool:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if answer is None:
            server.close()
        async with server:
            return await probe_ready(Address(host, port))

    return asyncio.run(run()), asked


def test_a_200_is_ready() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    assert probe(answer) == (True, b"GET /ready HTTP/1.1")
    assert probe(answer, "0.0.0.0")[0]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nlocation: /health\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
        None,
    ],
)
def test_anything_else_is_not(answer: bytes | None) -> None:
    assert not probe(answer)[0]


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert probe(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")[0]
