"""HTTP/1.1 connections to one engine: kept alive, and never left half-used when a call is cancelled.

httptools parses; the rest is our own, because what lies between a client and its engine costs on every token. Knows
HTTP only; ``engine_http`` knows what failures mean.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Mapping
from http import HTTPStatus
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

KEEPALIVE_S: Final = 4.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn by default closes one."""
HIGH_WATER_BYTES: Final = 64 * 2**10
"""Of an answer that nobody takes: then the connection is not read any further."""
MAX_HEAD_BYTES: Final = 64 * 2**10


class ConnectionFailedError(Exception):
    """Base class: the peer could not be reached, or the connection broke."""


class CannotConnectError(ConnectionFailedError):
    """Nobody listens there."""


class ConnectTimeoutError(ConnectionFailedError):
    """The peer took no connection in time."""


class BrokenConnectionError(ConnectionFailedError):
    """The connection ended, or what came is not HTTP, before the answer was whole."""


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
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
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
        """Send JSON, and take the whole answer: its status, headers and body. As ``send`` and ``read``, but what every
        request needs takes one wait."""
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
                body = await connection.take_whole()
                return connection.status, connection.headers, body
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
        self, connection: _Connection, message: bytes, limit_s: float | None, per_piece: bool
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

    async def _connect(self, timeout_s: float) -> _Connection:
        loop = asyncio.get_running_loop()
        limit = asyncio.timeout(timeout_s)
        self._connecting[limit] = None
        try:
            async with limit:
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop), self._host, self._port, ssl=self._tls
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

    def _reusable(self) -> _Connection | None:
        """The connection used last; those that expired, or that the server closed, are dropped on the way."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            connection.abort()
        return None

    def _done(self, connection: _Connection) -> None:
        """Nobody uses it any more: keep it if its answer was read to the end, and drop the oldest if it expired."""
        self._busy.discard(connection)
        if not connection.end():
            connection.abort()
            return
        self._idle.append(connection)
        if len(self._idle) > 1 and not self._idle[0].is_fresh():
            self._idle.pop(0).abort()


class Answer:
    """One answer. Its body is read once, by ``read`` or ``pieces``."""

    __slots__ = ("_connection", "_owner", "headers", "status")

    def __init__(self, connection: _Connection, owner: Connections) -> None:
        self.status = connection.status
        self.headers: Mapping[bytes, bytes] = connection.headers
        self._connection: _Connection | None = connection
        self._owner = owner

    def header(self, name: bytes) -> str | None:
        """The value of the header ``name`` (lower case)."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes: each time all that has arrived meanwhile."""
        while piece := await self.next_piece():
            yield piece

    def next_piece(self) -> Awaitable[bytes]:
        """All that has arrived and was not taken; waits for more when there is nothing. Empty at the end. Not after
        ``close``."""
        assert self._connection is not None
        return self._connection.take()

    async def read(self) -> bytes:
        """The whole body."""
        connection = self._connection
        return b"" if connection is None else await connection.take_all()

    def fail(self, error: Exception) -> None:
        """Whoever waits for the answer, now or next, gets ``error``; the connection is closed."""
        if self._connection is not None:
            self._connection.fail(error)

    async def close(self) -> None:
        """Give the connection back, or close it when the body was not read to its end. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._owner._done(connection)


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time: ``send``, ``head``, ``take`` ... or ``take_whole``, ``end``.

    Its timer outlives exchanges: one that goes off before its time looks at what is under way then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._closed = False
        self._reading = True
        self._in_exchange = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.heard = False
        self.limit_s: float | None = None
        self._per_piece = False
        self._head_bytes = 0
        self._has_head = False
        self._is_whole = False
        self._reusable = False
        self._error: Exception | None = None
        self._pieces: list[bytes] = []
        self._held = 0
        self._waiter: asyncio.Future[None] | None = None
        self._until_end = False

    # What ``Connections`` and ``Answer`` do

    def is_fresh(self) -> bool:
        """Whether an idle connection may be used again."""
        return not self._closed and self._loop.time() - self._idle_since < KEEPALIVE_S

    def send(self, message: bytes, limit_s: float | None, per_piece: bool) -> None:
        """Begin an exchange."""
        self._reset()
        self._in_exchange = True
        self._per_piece = per_piece
        self.limit_s = limit_s
        self._since = self._loop.time()
        if limit_s is not None and (self._timer is None or self._timer_at > self._since + limit_s):
            self._start_timer(self._since + limit_s)
        self._transport.write(message)

    async def head(self) -> None:
        """Wait for the answer's head."""
        while not self._has_head:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def take(self) -> bytes:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._is_whole:
                return b""
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._pieces = self._pieces, []
        self._held = 0
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def take_whole(self) -> bytes:
        """Wait for the head and the body at once."""
        self._until_end = True
        while not self._is_whole:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self._reading:
                self._until_end = False
                return await self.take_all()
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def take_all(self) -> bytes:
        parts = []
        while part := await self.take():
            parts.append(part)
        return b"".join(parts)

    def end(self) -> bool:
        """The exchange is over. Whether another one may follow."""
        self._in_exchange = False
        self._idle_since = self._loop.time()
        return self._is_whole and self._reusable and self._error is None and not self._closed

    def fail(self, error: Exception) -> None:
        """The exchange cannot go on."""
        if self._error is None and not self._is_whole:
            self._error = error
            self._wake()
        self.abort()

    def abort(self) -> None:
        self._stop_timer()
        self._closed = True
        self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _start_timer(self, when: float) -> None:
        self._stop_timer()
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._check_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_time(self) -> None:
        """The limit of this exchange, or of an earlier one, has passed."""
        self._timer = None
        if not self._in_exchange or self._is_whole or self.limit_s is None:
            return
        left = self._since + self.limit_s - self._loop.time()
        if self._pieces and self._per_piece:
            # With pieces it is not the peer who is slow, but whoever should take them.
            left = max(left, self.limit_s / 10)
        if left > 0:
            self._start_timer(self._loop.time() + left)
        else:
            self.fail(TimeoutError())

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._in_exchange:  # nobody asked: what it says now must not become the next answer
            self.abort()
            return
        self.heard = True
        if self._per_piece:
            self._since = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(BrokenConnectionError(str(error) or "not HTTP"))
            return
        if self._held > HIGH_WATER_BYTES and self._reading and not self._is_whole:
            self._reading = False
            self._transport.pause_reading()
        if self._has_head:
            if self._is_whole or not self._until_end or not self._reading:
                self._wake()
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.fail(BrokenConnectionError("the answer's head is too large"))

    def eof_received(self) -> None:
        return None  # the transport closes

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._is_whole:
            return
        if self._has_head and not self.headers.keys() & {b"content-length", b"transfer-encoding"}:
            self._is_whole = True  # its end is the connection's
        elif self._error is None:
            self._error = BrokenConnectionError(str(exc) if exc else "closed by the peer")
        self._stop_timer()
        self._wake()

    # The parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._is_whole:
            raise BrokenConnectionError("an answer that nobody asked for")
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._held += len(body)

    def on_message_complete(self) -> None:
        if not self._has_head:  # an interim answer, 100 for example
            if self.status == HTTPStatus.SWITCHING_PROTOCOLS:
                raise BrokenConnectionError("the peer wants to speak something else")
            self.headers.clear()
            return
        self._is_whole = True
        self._reusable = self._parser.should_keep_alive()
