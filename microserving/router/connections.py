"""HTTP/1.1 connections to one engine: kept alive, and never left half-used when a call is cancelled.

httpcore speaks the protocol; the pool is our own, because a task that is cancelled inside httpcore's pool can leave a
connection in it that is neither idle nor closed. Knows HTTP only; ``engine_http`` knows what failures mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

import httpcore

KEEPALIVE_S = 4.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn by default closes one."""

_BROKEN = (
    httpcore.ReadError,
    httpcore.WriteError,
    httpcore.RemoteProtocolError,
    httpcore.ConnectionNotAvailable,
)


class Connections:
    """Sends requests to ``url`` (scheme, host, port). Raises httpcore's exceptions."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        self._url = httpcore.URL(url)
        self._headers = {
            b"host": urlsplit(url).netloc.encode("ascii"),
            b"accept-encoding": b"identity",
        }
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[httpcore.AsyncHTTPConnection] = []
        self._busy: set[httpcore.AsyncHTTPConnection] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> int:
        """Connections that a call or an unfinished answer uses."""
        return len(self._busy)

    async def send(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[bytes, bytes] | None = None,
        content: bytes = b"",
        connect_timeout_s: float | None = None,
    ) -> Answer:
        """The answer's head; its body is read from the ``Answer``, which must be closed.

        connect_timeout_s: for this request, instead of the usual one.

        A request is sent once more when a reused connection breaks before the answer: so it looks when the server
        closes an idle connection just then. A server that did read the request refuses the second one, because its
        id is in use: nothing is ever done twice.
        """
        request = httpcore.Request(
            method,
            httpcore.URL(
                scheme=self._url.scheme, host=self._url.host, port=self._url.port, target=path.encode("ascii")
            ),
            headers=[
                *self._headers.items(),
                *(headers or {}).items(),
                (b"content-length", b"%d" % len(content)),
            ],
            content=content,
            extensions={"timeout": {"connect": connect_timeout_s or self._connect_timeout_s}},
        )
        connection = self._reusable()
        if connection is not None:
            with contextlib.suppress(*_BROKEN):
                return await self._send_on(connection, request)
        new = httpcore.AsyncHTTPConnection(self._url.origin, keepalive_expiry=KEEPALIVE_S)
        return await self._send_on(new, request)

    async def close(self) -> None:
        """Close all connections, also those in use. Idempotent."""
        for connection in [*self._idle, *self._busy]:
            self._discard(connection)
        self._idle.clear()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _send_on(self, connection: httpcore.AsyncHTTPConnection, request: httpcore.Request) -> Answer:
        self._busy.add(connection)
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._discard(connection)
            raise
        return Answer(response, connection, self)

    def _reusable(self) -> httpcore.AsyncHTTPConnection | None:
        """The connection used last; those that expired, or that the server closed, are dropped on the way."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            self._discard(connection)
        return None

    def _done(self, connection: httpcore.AsyncHTTPConnection) -> None:
        """An answer was closed: keep its connection if it was read to the end, and drop the oldest if it expired."""
        if connection not in self._busy:
            return
        if not connection.is_idle():
            self._discard(connection)
            return
        self._busy.remove(connection)
        self._idle.append(connection)
        while self._idle[0].has_expired():
            self._discard(self._idle.pop(0))
            if not self._idle:
                return

    def _discard(self, connection: httpcore.AsyncHTTPConnection) -> None:
        self._busy.discard(connection)
        task = asyncio.create_task(_close(connection))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class Answer:
    """One answer. ``pieces`` may be iterated once."""

    def __init__(
        self, response: httpcore.Response, connection: httpcore.AsyncHTTPConnection, owner: Connections
    ) -> None:
        self.status = response.status
        self._response = response
        self._connection = connection
        self._owner = owner

    def header(self, name: bytes) -> str | None:
        """The value of the header ``name`` (lower case)."""
        for key, value in self._response.headers:
            if key.lower() == name:
                return value.decode("latin-1")
        return None

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        return self._response.aiter_stream()

    async def read(self) -> bytes:
        """The whole body."""
        return await self._response.aread()

    async def close(self) -> None:
        """Give the connection back, or close it when the body was not read to its end. Idempotent."""
        try:
            await self._response.aclose()
        finally:
            self._owner._done(self._connection)


async def _close(connection: httpcore.AsyncHTTPConnection) -> None:
    with contextlib.suppress(httpcore.NetworkError, OSError):
        await connection.aclose()
