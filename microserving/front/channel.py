"""The way from one request to its client and back: what an ``Exchange`` needs of the HTTP server below it.

``AsgiChannel`` works with every ASGI server. Our own (``http_protocol``) brings a cheaper one for hot routes. Owns the
leaving client: work for one that has gone is cancelled. Does not know what is asked or answered.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from microserving.errors import InternalError, InvalidRequest, PayloadTooLarge

_logger = logging.getLogger(__name__)
_MAX_LENGTH_DIGITS = 18

Header = tuple[bytes, bytes]


class ClientLeftError(Exception):
    """The client closed the connection; nobody reads an answer any more."""


class Channel(ABC):
    """One request. headers: the client's, names in lower case. address: where it came from, "" when that is unknown."""

    headers: Sequence[Header]
    address: str

    async def read_body(self, max_bytes: int, timeout_s: float) -> bytes:
        """The whole body. Raises PayloadTooLarge, InvalidRequest when it does not come in time, ClientLeftError."""
        declared = next((value for name, value in self.headers if name == b"content-length"), b"")
        if declared.isdigit() and (len(declared) > _MAX_LENGTH_DIGITS or int(declared) > max_bytes):
            raise PayloadTooLarge(f"the body is larger than {max_bytes} bytes")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._receive_body(max_bytes)
        except TimeoutError:
            raise InvalidRequest("the body did not arrive in time") from None

    @abstractmethod
    async def _receive_body(self, max_bytes: int) -> bytes: ...

    @abstractmethod
    async def reply(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """The whole answer; its length is added to ``headers``."""

    @abstractmethod
    async def begin_stream(self, headers: Sequence[Header]) -> None:
        """The head of a streamed answer."""

    @abstractmethod
    async def write(self, data: bytes, *, more: bool) -> None:
        """A part of the stream; the last one when not ``more``. Waits while the client is slow to read."""

    def write_soon(self, data: bytes) -> Awaitable[None] | None:
        """As ``write`` of a part that is not the last one; None when there is nothing to wait for."""
        return self.write(data, more=True)

    @abstractmethod
    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``; when the client leaves first, cancel it, wait until it has cleaned up, raise ClientLeftError.

        A client has left when it closed the connection, or its sending half (which leavers do, too): TCP does not tell
        the two apart, and what is computed for a client that has left is lost to the others.
        """


class AsgiChannel(Channel):
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        self.headers = scope["headers"]
        self.address = client[0] if client else ""
        self._receive = receive
        self._send = send

    async def _receive_body(self, max_bytes: int) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise PayloadTooLarge(f"the body is larger than {max_bytes} bytes")
            if not message.get("more_body", False):
                return bytes(body)

    async def reply(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        own = (b"content-length", b"%d" % len(body))
        await self._send({"type": "http.response.start", "status": status, "headers": [own, *headers]})
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self, headers: Sequence[Header]) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": list(headers)})

    async def write(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(_client_gone(self._receive))
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            gone = not task.done()
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.wait((task, watch))
        if not gone:
            if (
                task.cancelled()
            ):  # not by us, and nobody cancelled us: the client must get an answer all the same
                raise cancelled_inside()
            task.result()
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            log_bad_end(error)
        raise ClientLeftError


def cancelled_inside() -> InternalError:
    """Work was cancelled, though its client is there and the server goes on."""
    return InternalError("the request was cancelled inside the server")


def log_bad_end(error: BaseException) -> None:
    """Work did not end as it should when it was cancelled."""
    _logger.error("cleaning up after the client left failed", exc_info=error)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
