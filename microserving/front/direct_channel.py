"""A ``Channel`` straight on the HTTP server's connection: the hot routes' way round ASGI.

Takes the place of uvicorn's request-response cycle in ``http_protocol``: the attributes without a leading underscore
that ``Channel`` does not have are those that uvicorn's protocol reads and sets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl

from microserving.errors import PayloadTooLarge
from microserving.front.channel import Channel, ClientLeftError, Header, cancelled_inside, log_bad_end

_logger = logging.getLogger(__name__)
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii")
    for status in HTTPStatus
    if status >= 200
}
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class DirectChannel(Channel):
    """serve: handles the exchange. common: headers of every answer. on_response: called when the answer is complete.

    A client that does not read is given ``write_timeout_s`` to take what is buffered for it (the transport's high-water
    mark, 64 KiB); then its connection is cut.
    """

    def __init__(
        self,
        serve: Callable[[Channel], Awaitable[None]],
        *,
        headers: Sequence[Header],
        address: str,
        transport: asyncio.Transport,
        flow: FlowControl,
        common: Sequence[Header],
        keep_alive: bool,
        expects_continue: bool,
        write_timeout_s: float,
        on_response: Callable[[], None],
    ) -> None:
        self.headers = headers
        self.address = address
        self.disconnected = False
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.message_event = self
        self._serve = serve
        self._transport = transport
        self._flow = flow
        self._common = common
        self._expects_continue = expects_continue
        self._write_timeout_s = write_timeout_s
        self._on_response = on_response
        self._waiter: asyncio.Future[None] | None = None
        self._running: asyncio.Task[Any] | None = None

    # What uvicorn's protocol calls

    async def run_asgi(self, _app: object) -> None:
        """In place of an ASGI app: serve the exchange, and leave nothing half-answered."""
        try:
            await self._serve(self)
        except Exception:  # the wall of walls: Endpoint answers every error itself
            _logger.exception("an answer broke off")
        finally:
            if not self.response_complete and not self.disconnected:
                self._transport.abort()

    def set(self) -> None:
        """As ``message_event``: a part of the body came, or the client left."""
        if self.disconnected and self._running is not None:
            self._running.cancel()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Channel

    async def read_body(self, max_bytes: int, timeout_s: float) -> bytes:
        if self.more_body:
            return await super().read_body(max_bytes, timeout_s)
        return self._take_body(max_bytes)

    async def _receive_body(self, max_bytes: int) -> bytes:
        if self._expects_continue and not self._transport.is_closing():
            self._transport.write(_CONTINUE)
        while self.more_body and not self.disconnected and len(self.body) <= max_bytes:
            self._flow.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.disconnected:
            raise ClientLeftError
        return self._take_body(max_bytes)

    def _take_body(self, max_bytes: int) -> bytes:
        if len(self.body) > max_bytes:
            raise PayloadTooLarge(f"the body is larger than {max_bytes} bytes")
        body, self.body = bytes(self.body), bytearray()
        self._flow.resume_reading()
        return body

    async def reply(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if not self.disconnected:
            head = self._head(status, headers, b"content-length: %d\r\n" % len(body))
            self._transport.write(head + body)
            self._complete()

    async def begin_stream(self, headers: Sequence[Header]) -> None:
        if not self.disconnected:
            self._transport.write(self._head(200, headers, b"transfer-encoding: chunked\r\n"))

    async def write(self, data: bytes, *, more: bool) -> None:
        if more:
            waiting = self.write_soon(data)
            if waiting is not None:
                await waiting
        elif not self.disconnected:
            self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
            self._complete()

    def write_soon(self, data: bytes) -> Awaitable[None] | None:
        if self.disconnected:
            return None
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return self._drain() if self._flow.write_paused else None

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        if self._gone():
            work.close()
            raise ClientLeftError
        task = self._running = asyncio.current_task()
        assert task is not None  # run_asgi's
        try:
            await work
        except asyncio.CancelledError:
            if self._gone():
                raise ClientLeftError from None
            if task.cancelling():
                raise
            raise cancelled_inside() from None
        except Exception as error:
            if not self._gone():
                raise
            log_bad_end(error)
            raise ClientLeftError from None
        finally:
            self._running = None

    def _gone(self) -> bool:
        return self.disconnected

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._flow.drain()
        except TimeoutError:
            _logger.warning("a client did not read for %g s: its stream ends", self._write_timeout_s)
            self.disconnected = True
            self._transport.abort()
            raise ClientLeftError from None

    def _head(self, status: int, headers: Sequence[Header], framing: bytes) -> bytes:
        self.response_started = True
        self._expects_continue = False
        lines = [_STATUS_LINES[status], framing]
        for name, value in (*self._common, *headers):
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"connection" and value == b"close":
                self.keep_alive = False
        if not self.keep_alive and lines[-1] != b"connection: close\r\n":
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._transport.close()
        self._on_response()
