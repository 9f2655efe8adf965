"""One HTTP/1.1 connection to an engine, and what may go wrong with it.

httptools parses; the rest is our own, because what lies between a client and its engine costs on every token. Knows one
exchange at a time; ``connections`` knows which connection takes the next one.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final, cast

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


class Connection(asyncio.Protocol):
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
            await self._news()

    async def take(self) -> bytes:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._is_whole:
                return b""
            await self._news()
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
            await self._news()
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

    def _news(self) -> asyncio.Future[None]:
        """Done at the next ``_wake``. One waits at a time; a wait that was cancelled is no longer told."""
        self._waiter = self._loop.create_future()
        return self._waiter

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
