"""uvicorn's httptools protocol with limits on what comes before and behind a body, and on the time it may take.

A POST to one of the app's ``endpoints`` is served past ASGI, by a ``DirectChannel``.

Owns: the bytes and headers of a request's head (431), bytes from which the parser makes nothing (431), how long a head
or an unread rest of a body may take to arrive, and what follows a whole request that cannot be parsed. Uvicorn bounds
none of these, and the parser keeps what it has not finished in memory. Refuses (400) what the parser lets through but
another parser on the way may read as something else: RFC 9112 3.2 and 6.1. Does not know bodies (``exchange``).

An upgrade (websocket, h2c) is answered as plain HTTP, as RFC 9110 7.8 allows. Bytes that are not HTTP behind a request whose answer is still due get no answer of
their own: the connection is closed after the one that is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NoReturn, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from microserving.front.direct_channel import DirectChannel
from microserving.front.exchange import Endpoint, plain_error
from microserving.protocol.responses import dump

MAX_HEAD_BYTES: Final = 64 * 2**10
MAX_HEADERS: Final = 200
"""Fields of one request, trailers included."""
HEAD_TIMEOUT_S: Final = 30.0
_VERSIONS: Final = ("1.1", "1.0")


class _HeadRefusedError(Exception):
    """Raised through the parser, which stops there."""


class BoundedHeadProtocol(HttpToolsProtocol):
    """Closes a connection whose next request's head is too long (after answering 431) or too slow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._too_large = False
        self._progressed = False
        self._unparsed_bytes = 0  # since the parser last had a whole head, a part of a body, or an end
        self._upgrading = False
        self._deaf = False  # nothing that still comes is read as HTTP
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since: float | None = None
        self._endpoints: Mapping[bytes, Endpoint] = getattr(self.app, "endpoints", {})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        super()._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        self._idle_since = None
        if self._deaf or self.transport.is_closing():
            return
        self._progressed = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgrading:
                self._read_as_plain(data[upgrade.args[0] :])
            else:  # CONNECT
                self._end_after_answer()
        except httptools.HttpParserError:
            self._refuse(431 if self._too_large else 400)
        else:
            # A read in which the parser got on does not count: it may be all body (and reads are bounded).
            self._unparsed_bytes = 0 if self._progressed else self._unparsed_bytes + len(data)
            if self._unparsed_bytes > MAX_HEAD_BYTES:
                self._refuse(431)
            elif self._in_head and self._timer is None and (self._head_bytes or not self._progressed):
                self._start_timer()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4  # ": " and the line's end
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refuse_head()
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._progressed = True
        if self._timer is not None:
            self._stop_timer()
        if _is_ambiguous(self.headers, self.parser.get_http_version()):
            raise _HeadRefusedError
        self._upgrading = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._upgrading:
            return
        endpoint = self._endpoints.get(self.url)
        if endpoint is None or self.parser.get_method() != b"POST" or self.parser.get_http_version() != "1.1":
            super().on_headers_complete()
        else:
            self._begin(endpoint)

    def _begin(self, endpoint: Endpoint) -> None:
        """As uvicorn does, but with our own channel instead of an ASGI cycle."""
        previous = self.cycle
        channel = DirectChannel(
            endpoint.serve,
            headers=self.headers,
            address=self.client[0] if self.client else "",
            transport=self.transport,
            flow=self.flow,
            common=self.server_state.default_headers,
            keep_alive=self.parser.should_keep_alive(),
            expects_continue=self.expect_100_continue,
            write_timeout_s=endpoint.write_timeout_s,
            on_response=self.on_response_complete,
        )
        self.cycle = cast(Any, channel)
        if previous is None or previous.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:  # the parser leaves the body to the other protocol
            return
        self._in_head = True
        self._head_bytes = 0
        self._progressed = True
        if self._timer is not None:
            self._stop_timer()
        super().on_message_complete()
        if (
            self.cycle.response_complete
        ):  # uvicorn's keep-alive timer ended when the rest of this message came
            self._start_timer()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since = self.loop.time()
            if self.timeout_keep_alive_task is None:
                self._close_when_idle_for(self.timeout_keep_alive)
        if self.cycle.response_complete and not self._in_head and not self.transport.is_closing():
            self._start_timer()  # answered before its body has come, which nobody reads

    def _unset_keepalive_if_required(self) -> None:
        """The timer stays, and looks when it goes off: one for many requests, where uvicorn has one for each."""
        self._idle_since = None

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None:  # the end of what is under way sets it again
            return
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._close_when_idle_for(left_s)
        else:
            super().timeout_keep_alive_handler()

    def _close_when_idle_for(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _refuse_head(self) -> NoReturn:
        self._too_large = True
        raise _HeadRefusedError

    def _read_as_plain(self, behind: bytes) -> None:
        """Parse the request again without its wish for an upgrade. behind: what was read after its head."""
        self._upgrading = False
        version = self.parser.get_http_version().encode("ascii")
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join([*lines, b"", behind]))

    def _refuse(self, status: int) -> None:
        """Answer ``status`` and close; when an answer is due to a whole request before, close after that one."""
        cycle = self.cycle
        answering = cycle is not None and not cycle.response_complete
        if answering and (self.pipeline or not cycle.more_body):
            self._end_after_answer()
            return
        if not (answering and cycle.response_started):
            self.transport.write(_refusal(status))
        self.transport.close()

    def _end_after_answer(self) -> None:
        self._deaf = True
        self._stop_timer()
        self.cycle.keep_alive = False
        if self.cycle.response_complete:
            self.transport.close()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._end_after_answer()


def _is_ambiguous(headers: Sequence[tuple[bytes, bytes]], version: str) -> bool:
    """Whether another parser may find another host or another end of the request than we do.

    The host: there is one, and HTTP/1.0 may do without. The end: of codings only ``chunked`` alone, and not in HTTP/1.0.
    """
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding" and (version != "1.1" or value.lower() != b"chunked"):
            return True
    return (hosts != 1 and (version != "1.0" or hosts > 1)) or version not in _VERSIONS


def _refusal(status: int) -> bytes:
    """A whole answer in the shape of our errors."""
    code = "invalid_http" if status == HTTPStatus.BAD_REQUEST else "request_header_fields_too_large"
    body = dump(plain_error(status, code))
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
