"""An idle connection that the server closes while we send on it: one retry, on a new connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from microserving.router.connection import BrokenConnectionError
from microserving.router.connections import Connections

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"


class Closer:
    """Answers the first request of each connection; what happens to later ones is up to ``second``."""

    def __init__(self, second: bytes, *, answers_first: bool = True) -> None:
        self.second = second
        self.answers_first = answers_first
        self.requests: list[int] = []
        self.connections = 0
        self.closed = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection, first = self.connections, self.answers_first
        try:
            while await self._read_request(reader):
                self.requests.append(connection)
                writer.write(OK if first else self.second)
                await writer.drain()
                if not first:
                    break
                first = False
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.closed.set()

    async def _read_request(self, reader: asyncio.StreamReader) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
        return True


async def post(client: Connections) -> tuple[int, bytes]:
    answer = await client.send("POST", "/x", content=b"body")
    try:
        return answer.status, await answer.read()
    finally:
        await answer.close()


def with_server(closer: Closer, scenario: Callable[[Connections], Awaitable[None]]) -> None:
    async def run() -> None:
        server = await asyncio.start_server(closer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Connections(f"http://127.0.0.1:{port}", connect_timeout_s=0.5)
        try:
            await scenario(client)
        finally:
            await client.close()
            server.close()
            await server.wait_closed()

    asyncio.run(run())


@pytest.mark.case("STR-09")
def test_a_stale_connection_is_retried_once_on_a_new_one() -> None:
    closer = Closer(second=b"")

    async def scenario(client: Connections) -> None:
        for _ in range(20):
            assert await post(client) == (200, b"{}")

    with_server(closer, scenario)
    # every request but the first one met the connection of the one before it, which was then closed
    assert closer.requests == [1] + [n for number in range(1, 20) for n in (number, number + 1)]


def test_a_new_connection_is_not_retried() -> None:
    """The server may have read the request and died of it."""
    closer = Closer(second=b"", answers_first=False)

    async def scenario(client: Connections) -> None:
        with pytest.raises(BrokenConnectionError):
            await post(client)

    with_server(closer, scenario)
    assert closer.requests == [1]


def test_an_answer_that_broke_off_is_not_retried() -> None:
    closer = Closer(second=OK[:-1])

    async def scenario(client: Connections) -> None:
        await post(client)
        with pytest.raises(BrokenConnectionError):
            await post(client)

    with_server(closer, scenario)
    assert closer.requests == [1, 1]


@pytest.mark.case("STR-09")
def test_a_connection_that_the_server_closed_meanwhile_is_not_used() -> None:
    closer = Closer(second=OK)

    async def scenario(client: Connections) -> None:
        await post(client)
        await post(client)  # the server closes the connection after this one
        await closer.closed.wait()
        assert await post(client) == (200, b"{}")

    with_server(closer, scenario)
    assert closer.requests == [1, 1, 2]


def test_closing_closes_what_is_in_use() -> None:
    closer = Closer(second=b"")

    async def scenario(client: Connections) -> None:
        answer = await client.send("GET", "/x")
        await post(client)
        assert client.busy == 1
        await client.close()
        assert client.busy == 0
        await answer.close()
        await client.close()

    with_server(closer, scenario)


def test_the_environment_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy for the outside must not get between router and engines."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")

    async def scenario(client: Connections) -> None:
        assert (await post(client))[0] == 200

    with_server(Closer(second=b""), scenario)
