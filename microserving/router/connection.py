"""One HTTP/1.1 connection to an engine, and what may go wrong with it.

httptools parses; the rest is our own, because what lies between a client and its engine costs on every token. Knows one
exchange at a time; ``connections`` knows which connection takes the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import SimpleNamespace
from typing import Final, cast

import httptools

KEEPALIVE_S: Final = 4.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn by default closes one."""
HIGH_WATER_BYTES: Final = 64 * 2**10
"""Of an answer that nobody takes: then the connection is not read any further."""
MAX_HEAD_BYTES: Final = 64 * 2**10

Listener = Callable[[bytes, bool, Exception | None], None]


class ConnectionFailedError(Exception):
    """Base class: the peer could not be reached, or the connection broke."""


class CannotConnectError(ConnectionFailedError):
    """Nobody listens there."""


class ConnectTimeoutError(ConnectionFailedError):
    """The peer took no connection in time."""


class BrokenConnectionError(ConnectionFailedError):
    """The connection ended, or what came is not HTTP, before the answer was whole."""


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time: ``send``; then ``whole`` and ``body``, or ``head`` and ``take`` ... or
    ``listen``; then ``end``.

    The parser hands fields and pieces of a body to C functions that keep them; Python runs when the head and when all of
    an answer is there. The timer outlives exchanges: one that goes off before its time looks at what is under way then.
    """

    __slots__ = (
        "_closed",
        "_error",
        "_feed",
        "_fields",
        "_has_head",
        "_head_bytes",
        "_held",
        "_in_exchange",
        "_is_whole",
        "_listener",
        "_loop",
        "_now",
        "_parser",
        "_per_piece",
        "_pieces",
        "_reading",
        "_reusable",
        "_since",
        "_timer",
        "_timer_at",
        "_transport",
        "_until_end",
        "_waiter",
        "heard",
        "idle_since",
        "limit_s",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._now = loop.time
        self._transport: asyncio.Transport
        self._fields: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        handlers = SimpleNamespace(
            on_header=self._fields.__setitem__,
            on_headers_complete=self._on_head,
            on_body=self._pieces.append,
            on_message_complete=self._on_end,
        )
        self._parser = httptools.HttpResponseParser(handlers)
        self._feed = self._parser.feed_data
        self._closed = False
        self._reading = True
        self._in_exchange = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.idle_since = 0.0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Listener | None = None
        self._is_whole = self._has_head = False
        self.limit_s: float | None = None

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Of the answer, names in lower case."""
        return {name.lower(): value for name, value in self._fields.items()}

    # What ``Connections`` and ``Answer`` do

    def is_fresh(self) -> bool:
        """Whether an idle connection may be used again."""
        return not self._closed and self._now() - self.idle_since < KEEPALIVE_S

    def send(self, message: bytes, limit_s: float | None, per_piece: bool) -> None:
        """Begin an exchange."""
        self._fields.clear()
        self._pieces.clear()
        self.status = self._head_bytes = self._held = 0
        self._has_head = self._is_whole = self._reusable = self._until_end = self.heard = False
        self._in_exchange = True
        self._per_piece = per_piece
        self.limit_s = limit_s
        self._since = since = self._now()
        if limit_s is not None and (self._timer is None or self._timer_at > since + limit_s):
            self._start_timer(since + limit_s)
        self._transport.write(message)

    async def head(self) -> None:
        """Wait for the answer's head."""
        while not self._has_head:
            if self._error is not None:
                raise self._error
            await self._news()

    def whole(self) -> asyncio.Future[None]:
        """Wait for all of the answer; ``body`` has it then. Raises what ended it before."""
        self._until_end = True
        waiter = self._news()
        if self._error is not None:
            waiter.set_exception(self._error)
        return waiter

    def body(self) -> bytes:
        """All that has arrived and was not taken."""
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def take(self) -> bytes:
        """All that has arrived and was not taken; waits for more when there is nothing. Empty at the end."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._is_whole:
                return b""
            await self._news()
        piece = self.body()
        self._pieces.clear()
        self.read_on()
        return piece

    async def take_all(self) -> bytes:
        parts = []
        while part := await self.take():
            parts.append(part)
        return b"".join(parts)

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with each piece as it comes (perhaps at once), whether it was the last one, and with the
        failure that ends the exchange."""
        self._listener = listener
        if self._pieces or self._is_whole or self._error is not None:
            self._tell()

    def pause(self) -> None:
        """Read no more for now."""
        if self._reading:
            self._reading = False
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Nothing is held any more."""
        self._held = 0
        if not self._reading:
            self._reading = True
            self._since = self._now()
            self._transport.resume_reading()

    def end(self) -> bool:
        """The exchange is over. Whether another one may follow."""
        self._in_exchange = False
        self._waiter = self._listener = None
        self.idle_since = self._now()
        return self._is_whole and self._reusable and self._error is None and not self._closed

    def fail(self, error: Exception) -> None:
        """The exchange cannot go on."""
        if self._error is None and not self._is_whole:
            self._error = error
            self._tell()
        self.abort()

    def abort(self) -> None:
        self._stop_timer()
        self._closed = True
        self._transport.abort()

    def _news(self) -> asyncio.Future[None]:
        """Done when there are some. One waits at a time; a wait that was cancelled is no longer told."""
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def _tell(self) -> None:
        if self._listener is not None:
            piece = self.body()
            self._pieces.clear()
            self._listener(piece, self._is_whole, self._error)
        elif (waiter := self._waiter) is not None and not waiter.done():
            if self._error is not None and self._until_end:
                waiter.set_exception(self._error)
            else:
                waiter.set_result(None)

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
        left = self._since + self.limit_s - self._now()
        if self._per_piece and (self._pieces or not self._reading):
            # With pieces it is not the peer who is slow, but whoever should take them.
            left = max(left, self.limit_s / 10)
        if left > 0:
            self._start_timer(self._now() + left)
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
            self._since = self._now()
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(BrokenConnectionError(str(error) or "not HTTP"))
            return
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.fail(BrokenConnectionError("the answer's head is too large"))
        elif (listener := self._listener) is not None:  # as ``_tell`` does: for every token
            pieces = self._pieces
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            listener(piece, self._is_whole, self._error)
        elif self._is_whole:
            self._tell()
        elif not self._until_end:
            self._held += len(data)
            if self._held > HIGH_WATER_BYTES:
                self.pause()
            self._tell()

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
        self._tell()

    # The parser

    def _on_head(self) -> None:
        if self._is_whole:
            raise BrokenConnectionError("an answer that nobody asked for")
        self.status = status = self._parser.get_status_code()
        self._has_head = status >= 200

    def _on_end(self) -> None:
        if not self._has_head:  # an interim answer, 100 for example
            if self.status == HTTPStatus.SWITCHING_PROTOCOLS:
                raise BrokenConnectionError("the peer wants to speak something else")
            self._fields.clear()
            return
        self._is_whole = True
        self._reusable = self._parser.should_keep_alive()
