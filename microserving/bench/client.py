"""A streaming client that writes down when each piece of output came. Owns the reading of chunks and what went wrong.

Knows OpenAI's two endpoints as far as their streams go. Bytes come from a ``Wire``: HTTP here, anything in tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol
from urllib.parse import urlsplit

from microserving.bench.measurement import Measured
from microserving.errors import ConfigError, EngineUnavailable
from microserving.protocol.sse import DONE_DATA, SSEParser
from microserving.router.connection import ConnectionFailedError
from microserving.router.connections import Connections

_CONNECT_TIMEOUT_S = 10.0
_END_S = 1.0
"""Of a stream whose last event has come."""
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
"""Where a chat's chunk has output, beside its tool calls."""


class FailedRequestError(Exception):
    """kind: a short word that failures are counted by, as `503 overloaded`. message: the server's own, if it has one."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.message = message


class Wire(Protocol):
    def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Post ``body`` and give the answer's bytes as they arrive. Raises FailedRequestError."""
        ...


class HttpWire:
    """OpenAI's address (``http://host:port/v1``; the `/v1` may be left out). Raises ConfigError for what is no URL.

    url: without a slash at its end; what follows is the path of an endpoint."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """timeout_s: after which an answer that is not whole has failed."""
        if not _is_address(base_url):
            raise ConfigError(f"{base_url!r} is no address of a server, as http://127.0.0.1:8000/v1")
        parts = urlsplit(base_url)
        self._prefix = parts.path.rstrip("/") or "/v1"
        self.url = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        self._timeout_s = timeout_s
        self._headers = {b"content-type": b"application/json"}
        self._connections = Connections(
            base_url,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            authorization=None if api_key is None else f"Bearer {api_key}".encode(),
        )

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        try:
            answer = await self._connections.send(
                "POST", self._prefix + path, headers=self._headers, content=body, limit_s=self._timeout_s
            )
            try:
                if answer.status != 200:
                    raise _refusal(answer.status, await answer.read())
                while piece := await answer.next_piece():
                    yield piece
            finally:
                await answer.close()
        except TimeoutError:
            raise FailedRequestError("timeout") from None
        except ConnectionFailedError as error:
            raise FailedRequestError(f"connection: {error}") from None

    async def close(self) -> None:
        await self._connections.close()


async def measure(
    wire: Wire, path: str, body: Mapping[str, Any], record: Measured, clock: Callable[[], float]
) -> str:
    """Send a request and fill in ``record``; its text. What fails is in ``record.error``; only cancellation is raised.

    clock: seconds since the run began.
    """
    try:
        return await try_to_measure(wire, path, body, record, clock)
    except FailedRequestError:
        return ""


async def try_to_measure(
    wire: Wire, path: str, body: Mapping[str, Any], record: Measured, clock: Callable[[], float]
) -> str:
    """As ``measure``. Raises FailedRequestError when ``record`` is filled in."""
    reading = _Reading(record)
    payload = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    record.sent = clock()
    try:
        await _read_all(wire.stream(path, payload), reading, clock)
        reading.check_end()
    except FailedRequestError as error:
        record.error, record.ended = error.kind, clock()
        raise
    record.ended = clock() if reading.ended is None else reading.ended
    return "".join(reading.texts)


async def _read_all(
    stream: AsyncGenerator[bytes, None], reading: _Reading, clock: Callable[[], float]
) -> None:
    """To its end, so that the connection can be used again. What comes of it after the last event, or does not, is not
    the answer's. Raises FailedRequestError."""
    try:
        async with aclosing(stream) as pieces, asyncio.timeout(None) as limit:
            async for piece in pieces:
                reading.feed(piece, clock())
                if reading.is_whole and limit.when() is None:
                    limit.reschedule(asyncio.get_running_loop().time() + _END_S)
    except TimeoutError:
        return
    except FailedRequestError:
        if not reading.is_whole:
            raise
    except EngineUnavailable as error:  # an event over the parser's limit
        raise FailedRequestError(error.message) from None


class _Reading:
    """The stream of one answer, so far."""

    def __init__(self, record: Measured) -> None:
        self.texts: list[str] = []
        self.is_whole = False
        self.ended: float | None = None
        self._record = record
        self._parser = SSEParser()

    def feed(self, data: bytes, now: float) -> None:
        """Take what came at ``now``. Raises FailedRequestError for what is no chunk, or an error."""
        for event in self._parser.feed(data):
            if event == DONE_DATA:
                self.is_whole, self.ended = True, now
            else:
                self._take(event, now)

    def check_end(self) -> None:
        """The stream is over: it must have been whole, and its tokens be counted."""
        if not self.is_whole and self._record.finish is None:
            raise FailedRequestError("the stream was cut off")
        if not self._record.pieces and not self._record.output_tokens and self._record.finish is None:
            raise FailedRequestError("an answer without a token")
        if not self._record.usage:
            self._record.output_tokens = self._record.piece_tokens

    def _take(self, event: str, now: float) -> None:
        try:
            chunk = json.loads(event)
        except (ValueError, RecursionError):
            raise FailedRequestError("a chunk is not JSON") from None
        if not isinstance(chunk, dict):
            raise FailedRequestError("a chunk is no object")
        if chunk.get("error"):
            raise FailedRequestError(_error_kind(chunk["error"]), _error_message(chunk["error"]))
        try:
            self._read(chunk, now)
        except (AttributeError, TypeError, ValueError):
            raise FailedRequestError("a chunk is not as OpenAI has them") from None

    def _read(self, chunk: Mapping[str, Any], now: float) -> None:
        """Raises whatever reading it in another form than OpenAI's raises."""
        if isinstance(usage := chunk.get("usage"), dict):  # with or without choices, once or with each chunk
            self._count(usage)
        for choice in chunk.get("choices") or ():
            self._choose(choice, now)

    def _choose(self, choice: Mapping[str, Any], now: float) -> None:
        record = self._record
        text, tool_calls = _output(choice)
        tokens = len(choice.get("token_ids") or ())
        if text or tool_calls or tokens:
            record.pieces.append(now)
            record.piece_tokens += tokens or 1
            record.completed = now
            self.texts.append(text)
        if choice.get("finish_reason"):
            record.finish = str(choice["finish_reason"])
            record.completed = now

    def _count(self, usage: Mapping[str, Any]) -> None:
        record = self._record
        record.usage = True
        record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        record.output_tokens = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = int(details.get("cached_tokens") or 0)


def _output(choice: Mapping[str, Any]) -> tuple[str, bool]:
    """The text of a choice's chunk, and whether it has a piece of a tool call. A role alone is no output."""
    if (text := choice.get("text")) is not None:
        return "".join((text,)), False  # TypeError for what is no text
    delta = choice.get("delta") or {}
    return "".join(delta.get(key) or "" for key in _TEXTS), bool(delta.get("tool_calls"))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        return False
    more = parts.username is not None or "?" in url or "#" in url  # nothing of that could be sent
    plain = url.isascii() and url.isprintable() and " " not in url and not more
    labels = host.removesuffix(".").split(".")
    return (
        plain and parts.scheme in ("http", "https") and port != 0 and all(0 < len(one) < 64 for one in labels)
    )


def _refusal(status: int, body: bytes) -> FailedRequestError:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return FailedRequestError(str(status))
    return FailedRequestError(f"{status} {_error_kind(error)}", _error_message(error))


def _error_kind(error: object) -> str:
    """OpenAI's code, else its type."""
    if not isinstance(error, dict):
        return "error"
    return str(error.get("code") or error.get("type") or "error")


def _error_message(error: object) -> str:
    return str(error.get("message") or "") if isinstance(error, dict) else str(error)
