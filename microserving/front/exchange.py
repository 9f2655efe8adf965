"""One HTTP request and its answer, with exactly one ending.

Owns: the bounded body, the server-made request id, the client that leaves, and how an error is answered before and
after a stream has begun. Does not know what is asked or answered.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

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
from microserving.front.access import Access, current_client
from microserving.front.channel import AsgiChannel, Channel, ClientLeftError, Header
from microserving.front.cors import Cors
from microserving.front.settings import BodyLimits, FrontSettings
from microserving.observability import request_id_scope
from microserving.protocol.body import MAX_VALUES
from microserving.protocol.responses import dump, error_event

_logger = logging.getLogger(__name__)
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")
_MAX_CLIENT_ID_CHARS = 128
_DEFAULT_RETRY_AFTER_S = 1
_CLOSE = (b"connection", b"close")
"""With an answer to a body that was not read whole: the rest is not worth waiting for."""
_JSON = (b"content-type", b"application/json")
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(slots=True)
class Exchange:
    """What a handler works with. request_id: made here, unique. headers: of the answer, may be added to before it
    begins. max_values: JSON values that the body may hold. client_headers: of the request, names in lower case. arrived:
    by ``time.monotonic``. error_event: how an error is told in a stream. The answer is either one ``reply`` or a stream
    (``send_events`` ..., then ``end_stream``)."""

    request_id: str
    body: bytes
    headers: list[tuple[bytes, bytes]]
    _channel: Channel
    max_values: int = MAX_VALUES
    client_headers: Sequence[tuple[bytes, bytes]] = ()
    arrived: float = field(default_factory=time.monotonic, init=False)
    error_event: Callable[[MicroservingError], bytes] = field(default=error_event, init=False)
    streaming: bool = field(default=False, init=False)
    _replied: bool = field(default=False, init=False)

    async def reply(
        self, body: bytes, *, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """The whole answer, as JSON."""
        self._replied = True
        await self._channel.reply(status, [_JSON, *self.headers, *headers], body)

    async def reply_json(self, value: Any, *, status: int = 200) -> None:
        await self.reply(dump(value), status=status)

    async def send_events(self, events: bytes) -> None:
        """Stream some events, encoded; the first call also sends the headers."""
        if not self.streaming:
            self.streaming = True
            await self._channel.begin_stream([*_STREAM_HEADERS, *self.headers])
        await self._write(events)

    @property
    def send_event(self) -> Callable[[bytes], Awaitable[None] | None]:
        """The same, when events have been sent before. None: there is nothing to wait for."""
        return self._channel.write_soon

    async def end_stream(self, events: bytes) -> None:
        """The last events and the end of the answer."""
        self._replied = True
        await self._write(events, more=False)

    async def fail(self, error: MicroservingError) -> None:
        """Answer with ``error``: a status and a body, or the last event (without end marker) in a stream."""
        if self._replied:
            return
        if self.streaming:
            await self.end_stream(self.error_event(error))
        else:
            body = dump(error_body(error))
            await self.reply(body, status=http_status(error), headers=error_headers(error))

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        await self._channel.write(data, more=more)


Handler = Callable[[Exchange], Coroutine[Any, Any, None]]


class Endpoint:
    """A handler as an ASGI app for POST: reads the body, watches for the client's leaving, answers errors."""

    def __init__(
        self,
        handler: Handler,
        settings: FrontSettings,
        limits: Callable[[], BodyLimits],
        access: Access,
        cors: Cors,
    ) -> None:
        """limits: asked once per request. access, cors: the front's."""
        self._handler = handler
        self._settings = settings
        self._limits = limits
        self._access = access
        self._cors = cors if cors else None
        self.write_timeout_s = settings.write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.serve(AsgiChannel(scope, receive, send))

    async def serve(self, channel: Channel) -> None:
        """Handle one exchange to its end."""
        request_id = os.urandom(16).hex()
        limits = self._limits()
        echoed = client_id(_value(channel.headers, b"x-request-id")) or request_id
        exchange = Exchange(
            request_id=request_id,
            body=b"",
            headers=[(b"x-request-id", echoed.encode("ascii"))],
            _channel=channel,
            max_values=limits.max_values,
            client_headers=channel.headers,
        )
        if self._cors is not None:
            exchange.headers += self._cors.headers(channel.headers)
        outcome = "cancelled"
        with request_id_scope(request_id):
            try:
                client = self._enter(channel, exchange)
                try:
                    exchange.body = await self._read_body(channel, exchange, limits.max_bytes)
                    await channel.run(self._handler(exchange))
                finally:
                    self._access.leave(client)
                outcome = "ok"
            except ClientLeftError:
                _logger.info("the client left before the answer was complete")
            except Exception as error:  # noqa: BLE001 - the wall between our bugs and the client
                told = client_error(error)
                outcome = told.code or "internal_error"
                await exchange.fail(told)
            finally:
                if self._settings.on_ended is not None:
                    self._settings.on_ended(outcome)

    def _enter(self, channel: Channel, exchange: Exchange) -> str:
        """Who asks; the admission to the service begins with it."""
        try:
            client = self._access.enter(channel.headers, channel.address)
        except MicroservingError:
            exchange.headers.append(_CLOSE)
            raise
        current_client.set(client)
        return client

    async def _read_body(self, channel: Channel, exchange: Exchange, max_bytes: int) -> bytes:
        try:
            return await channel.read_body(max_bytes, self._settings.body_timeout_s)
        except (InvalidRequest, PayloadTooLarge):
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


def client_id(given: str) -> str:
    """The client's own request id as far as it may be echoed: printable ASCII, bounded. It is never used as a key."""
    return _UNPRINTABLE.sub("", given[:_MAX_CLIENT_ID_CHARS])


def _value(headers: Sequence[Header], wanted: bytes) -> str:
    for name, value in headers:
        if name == wanted:
            return value.decode("latin-1")
    return ""


def error_headers(error: MicroservingError) -> list[tuple[bytes, bytes]]:
    """The headers that ``error`` answers with, beside those of every answer."""
    headers = []
    if http_status(error) in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        seconds = (
            _DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else max(1, math.ceil(error.retry_after_s))
        )
        headers.append((b"retry-after", b"%d" % seconds))
    if http_status(error) == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
