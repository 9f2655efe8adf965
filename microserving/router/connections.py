"""HTTP/1.1 connections to one engine: kept alive, and never left half-used when a call is cancelled.

Knows HTTP only; ``engine_http`` knows what failures mean.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from microserving.router.connection import (
    KEEPALIVE_S,
    BrokenConnectionError,
    CannotConnectError,
    Connection,
    ConnectTimeoutError,
    Listener,
)

_NONE: Final[Mapping[bytes, bytes]] = MappingProxyType({})


class Connections:
    """Sends requests to ``url`` (scheme, host, port). Raises ConnectionFailedError leaves."""

    def __init__(self, url: str, *, connect_timeout_s: float, authorization: bytes | None = None) -> None:
        """authorization: the header of that name for every request."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._common = b"host: %s\r\naccept-encoding: identity\r\n" % parts.netloc.encode("ascii")
        if authorization is not None:
            self._common += b"authorization: %b\r\n" % authorization
        self._connect_timeout_s = connect_timeout_s
        self._heads: dict[str, bytes] = {}
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._connecting: dict[asyncio.Timeout, Exception | None] = {}

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
        limit_s: float | None = None,
        per_piece: bool = False,
    ) -> Answer:
        """The answer's head; its body is read from the ``Answer``, which must be closed.

        connect_timeout_s: for this request, instead of the usual one. limit_s: the answer must be whole so many
        seconds after the request was sent, or with per_piece: no silence may be longer. Raises TimeoutError, also from
        the ``Answer``, when it is not.

        A request is sent once more when a reused connection breaks before the answer: so it looks when the server
        closes an idle connection just then. A server that did read the request refuses the second one, because its
        id is in use: nothing is ever done twice.
        """
        lines = b"".join(b"%s: %s\r\n" % header for header in (headers or {}).items())
        head = b"%s %s HTTP/1.1\r\n%s%scontent-length: %d\r\n\r\n" % (
            method.encode("ascii"),
            path.encode("ascii"),
            self._common,
            lines,
            len(content),
        )
        message = head + content
        connection = self._reusable()
        if connection is not None:
            try:
                return await self._send_on(connection, message, limit_s, per_piece)
            except BrokenConnectionError:
                if connection.heard:
                    raise
        connection = await self._connect(connect_timeout_s or self._connect_timeout_s)
        return await self._send_on(connection, message, limit_s, per_piece)

    async def post(
        self, path: str, content: bytes, *, limit_s: float
    ) -> tuple[int, Mapping[bytes, bytes], bytes]:
        """Send JSON, and take the whole answer: its status, its headers (unless the status is 200) and its body. As
        ``send`` and ``read``, but what every request needs takes one wait."""
        head = self._heads.get(path)
        if head is None:
            head = self._heads[path] = self._post_head(path)
        message = b"%b%d\r\n\r\n%b" % (head, len(content), content)
        reused = connection = self._reusable()
        while True:
            if connection is None:
                connection = await self._connect(self._connect_timeout_s)
            self._busy.add(connection)
            try:
                connection.send(message, limit_s, False)
                await connection.whole()
                status = connection.status
                return status, _NONE if status == 200 else connection.headers, connection.body()
            except BrokenConnectionError:
                if connection is not reused or connection.heard:
                    raise
            finally:
                self._done(connection)
            connection = None

    def fail_all(self, error: Exception) -> None:
        """Whoever waits for a connection, or for an answer that has a limit, gets ``error`` now."""
        for connection in list(self._busy):
            if connection.limit_s is not None:
                connection.fail(error)
        for limit in self._connecting:
            if not limit.expired():  # one that is just ending cannot be moved any more
                self._connecting[limit] = error
                limit.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Close all connections, also those in use. Idempotent."""
        for connection in [*self._idle, *self._busy]:
            connection.fail(BrokenConnectionError("the connection was closed"))
        self._idle.clear()
        self._busy.clear()

    async def _send_on(
        self, connection: Connection, message: bytes, limit_s: float | None, per_piece: bool
    ) -> Answer:
        self._busy.add(connection)
        try:
            connection.send(message, limit_s, per_piece)
            await connection.head()
        except BaseException:
            self._done(connection)
            raise
        return Answer(connection, self)

    def _post_head(self, path: str) -> bytes:
        """All up to the value of the content length."""
        json = b"content-type: application/json\r\n"
        return b"POST %b HTTP/1.1\r\n%b%bcontent-length: " % (path.encode("ascii"), self._common, json)

    async def _connect(self, timeout_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(timeout_s)
        self._connecting[limit] = None
        try:
            async with limit:
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            if not limit.expired():  # the kernel's own
                raise CannotConnectError("timed out") from None
            raise self._connecting[limit] or ConnectTimeoutError() from None
        except OSError as error:
            raise CannotConnectError(error.strerror or type(error).__name__) from None
        finally:
            del self._connecting[limit]
        return connection

    def _reusable(self) -> Connection | None:
        """The connection used last; those that expired, or that the server closed, are dropped on the way."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.is_fresh():
                return connection
            connection.abort()
        return None

    def _done(self, connection: Connection) -> None:
        """Nobody uses it any more: keep it if its answer was read to the end, and drop the oldest if it expired."""
        self._busy.discard(connection)
        if not connection.end():
            connection.abort()
            return
        idle = self._idle
        idle.append(connection)
        if idle[0].idle_since < connection.idle_since - KEEPALIVE_S:
            idle.pop(0).abort()


class Answer:
    """One answer. Its body is read once, by ``read`` or ``next_piece``."""

    __slots__ = ("_connection", "_owner", "headers", "status")

    def __init__(self, connection: Connection, owner: Connections) -> None:
        self.status = connection.status
        self.headers: Mapping[bytes, bytes] = connection.headers
        self._connection: Connection | None = connection
        self._owner = owner

    def listen(self, listener: Listener) -> None:
        """See ``Connection.listen``; instead of ``next_piece`` and ``read``."""
        assert self._connection is not None
        self._connection.listen(listener)

    def pause(self) -> None:
        """Of who listens: read no more until ``read_on``."""
        if self._connection is not None:
            self._connection.pause()

    def read_on(self) -> None:
        """See ``pause``."""
        if self._connection is not None:
            self._connection.read_on()

    def next_piece(self) -> Awaitable[bytes]:
        """All that has arrived and was not taken; waits for more when there is nothing. Empty at the end. Not after
        ``close``."""
        assert self._connection is not None
        return self._connection.take()

    async def read(self) -> bytes:
        """The whole body."""
        connection = self._connection
        return b"" if connection is None else await connection.take_all()

    def let_go(self) -> None:
        """Give the connection back, or close it when the body was not read to its end. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._owner._done(connection)

    async def close(self) -> None:
        """``let_go``."""
        self.let_go()
