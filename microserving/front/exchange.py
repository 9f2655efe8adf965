"""One HTTP request and its answer, with exactly one ending.

Owns: the bounded body, the server-made request id, the client that leaves, and how an error is answered before and
after a stream has begun. Does not know what is asked or answered.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from microserving.errors import (
    InternalError,
    InvalidRequest,
    MicroservingError,
    PayloadTooLarge,
    ShuttingDown,
    error_body,
    http_status,
)
from microserving.front.settings import BodyLimits, FrontSettings
from microserving.observability import request_id_scope
from microserving.protocol.body import MAX_VALUES
from microserving.protocol.responses import dump
from microserving.protocol.sse import DONE_EVENT, encode_event

_logger = logging.getLogger(__name__)
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")
_MAX_CLIENT_ID_CHARS = 128
_DEFAULT_RETRY_AFTER_S = 1
_CLOSE = (b"connection", b"close")
"""With an answer to a body that was not read whole: the rest is not worth waiting for."""
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class _ClientLeftError(Exception):
    """The client closed the connection; nobody reads an answer any more."""


@dataclass(slots=True)
class Exchange:
    """What a handler works with. request_id: made here, unique. headers: of the answer, may be added to before it
    begins. max_values: JSON values that the body may hold. client_headers: of the request, as ASGI has them. arrived: by
    ``time.monotonic``. The answer is either one ``reply`` or a stream (``send_events`` ..., then ``end_stream``)."""

    request_id: str
    body: bytes
    headers: list[tuple[bytes, bytes]]
    _send: Send
    max_values: int = MAX_VALUES
    client_headers: Sequence[tuple[bytes, bytes]] = ()
    arrived: float = field(default_factory=time.monotonic, init=False)
    streaming: bool = field(default=False, init=False)
    _replied: bool = field(default=False, init=False)

    async def reply(
        self, body: bytes, *, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """The whole answer, as JSON."""
        self._replied = True
        own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": [*own, *self.headers, *headers],
        }
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def reply_json(self, value: Any, *, status: int = 200) -> None:
        await self.reply(dump(value), status=status)

    async def send_events(self, events: Sequence[bytes]) -> None:
        """Stream the data of some events; the first call also sends the headers."""
        if not self.streaming:
            self.streaming = True
            headers = [*_STREAM_HEADERS, *self.headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write(b"".join(map(encode_event, events)))

    async def end_stream(self) -> None:
        """The end marker and the end of the answer."""
        self._replied = True
        await self._write(DONE_EVENT, more=False)

    async def fail(self, error: MicroservingError) -> None:
        """Answer with ``error``: a status and a body, or one last event (without end marker) in a stream."""
        if self._replied:
            return
        body = dump(error_body(error))
        if self.streaming:
            self._replied = True
            await self._write(encode_event(body), more=False)
        else:
            await self.reply(body, status=http_status(error), headers=error_headers(error))

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """A handler as an ASGI app for POST: reads the body, watches for the client's leaving, answers errors."""

    def __init__(self, handler: Handler, settings: FrontSettings, limits: Callable[[], BodyLimits]) -> None:
        """limits: asked once per request."""
        self._handler = handler
        self._settings = settings
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = uuid.uuid4().hex
        limits = self._limits()
        echoed = client_id(Headers(scope=scope)) or request_id
        exchange = Exchange(
            request_id=request_id,
            body=b"",
            headers=[(b"x-request-id", echoed.encode("ascii"))],
            _send=send,
            max_values=limits.max_values,
            client_headers=scope["headers"],
        )
        with request_id_scope(request_id):
            try:
                exchange.body = await self._read_body(scope, receive, exchange, limits.max_bytes)
                await _unless_gone(self._handler(exchange), receive)
            except _ClientLeftError:
                _logger.info("the client left before the answer was complete")
            except Exception as error:  # noqa: BLE001 - the wall between our bugs and the client
                await exchange.fail(client_error(error))

    async def _read_body(self, scope: Scope, receive: Receive, exchange: Exchange, max_bytes: int) -> bytes:
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await _read_bounded(scope, receive, max_bytes)
        except TimeoutError:
            exchange.headers.append(_CLOSE)
            raise InvalidRequest("the body did not arrive in time") from None
        except PayloadTooLarge:
            exchange.headers.append(_CLOSE)
            raise


def client_error(error: Exception) -> MicroservingError:
    """What a client is told of ``error``. Failures of ours are logged here; of a bug no detail leaves."""
    if not isinstance(error, MicroservingError):
        _logger.error("a handler failed", exc_info=error)
        return InternalError("internal error; the server's log has the details")
    if http_status(error) >= 500 and not error.logged:
        # Refusing work for a while (503) is not worth an operator's attention each time.
        level = logging.INFO if http_status(error) == HTTPStatus.SERVICE_UNAVAILABLE else logging.ERROR
        if isinstance(error, ShuttingDown):  # "stopping" has been said once
            level = logging.DEBUG
        _logger.log(level, "answered %d: %s", http_status(error), error.message)
    return error


def plain_error(status: int, code: str, message: str | None = None) -> dict[str, Any]:
    """The body of an error that no exception stands for (unknown route, wrong method)."""
    return {
        "error": {
            "message": message or HTTPStatus(status).phrase,
            "type": "not_found_error" if status == HTTPStatus.NOT_FOUND else "invalid_request_error",
            "param": None,
            "code": code,
        }
    }


async def _read_bounded(scope: Scope, receive: Receive, limit: int) -> bytes:
    too_large = PayloadTooLarge(f"the body is larger than {limit} bytes")
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeftError
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


async def _unless_gone(work: Awaitable[None], receive: Receive) -> None:
    """Run ``work``; when the client leaves first, cancel it, wait until it has cleaned up, and raise _ClientLeftError."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_client_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        gone = not task.done()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.wait((task, watch))
    if not gone:
        if task.cancelled():  # not by us, and nobody cancelled us: the client must get an answer all the same
            raise InternalError("the request was cancelled inside the server")
        task.result()
        return
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.error("cleaning up after the client left failed", exc_info=error)
    raise _ClientLeftError


async def _client_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection, or its sending half (which leavers do, too): TCP does not tell
    the two apart, and what is computed for a client that has left is lost to the others. Clients must keep it open."""
    while (await receive())["type"] != "http.disconnect":
        pass


def client_id(headers: Headers) -> str:
    """The client's own request id as far as it may be echoed: printable ASCII, bounded. It is never used as a key."""
    return _UNPRINTABLE.sub("", headers.get("x-request-id", "")[:_MAX_CLIENT_ID_CHARS])


def error_headers(error: MicroservingError) -> list[tuple[bytes, bytes]]:
    """The headers that ``error`` answers with, beside those of every answer."""
    headers = []
    if http_status(error) in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        seconds = (
            _DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else max(1, math.ceil(error.retry_after_s))
        )
        headers.append((b"retry-after", b"%d" % seconds))
    return headers
