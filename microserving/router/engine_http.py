"""JSON calls and streams to one engine, with every failure as a leaf of ``errors``.

Knows HTTP and the error bodies; not what is asked (``engine_client``) nor when an engine counts as up
(``engine_registry``): it reports lost connections and can be told to give up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeVar

from microserving.errors import (
    EngineUnavailable,
    InternalError,
    LeaseError,
    MicroservingError,
    ModelNotFound,
    Overloaded,
    RateLimited,
    RequestConflict,
    ShuttingDown,
    TransferFailed,
    Unauthorized,
    error_from_body,
)
from microserving.protocol.responses import dump
from microserving.router.connection import (
    CannotConnectError,
    ConnectionFailedError,
    ConnectTimeoutError,
)
from microserving.router.connections import Answer, Connections

ResultT = TypeVar("ResultT")

_JSON = {b"content-type": b"application/json"}
_SEEN_AS: Mapping[type[MicroservingError], type[MicroservingError]] = MappingProxyType(
    {
        LeaseError: TransferFailed,
        RateLimited: Overloaded,
        RequestConflict: EngineUnavailable,
        ModelNotFound: EngineUnavailable,
        Unauthorized: EngineUnavailable,
        InternalError: EngineUnavailable,
    }
)
"""An engine's refusal that is about the router, not about the client's request: what it is for the client."""


class EngineHTTP:
    """The connections to one engine. ``name`` is what messages call it; it holds no address.

    on_unreachable: called with the reason (for operators) when a connection is refused or breaks.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        on_unreachable: Callable[[str], None],
        authorization: bytes | None = None,
    ) -> None:
        self.name = "the engine"
        self._silence = "does not answer"
        self._shutting_down = False
        self._given_up = False
        self._connections = Connections(url, connect_timeout_s=connect_timeout_s, authorization=authorization)
        self._on_unreachable = on_unreachable
        self._waits: set[_Wait] = set()

    async def get(self, path: str, *, timeout_s: float) -> dict[str, Any]:
        """The JSON object at ``path``. Raises the leaf that the failure or the error answer stands for."""
        return self._object(*await self._exchange("GET", path, b"", timeout_s))

    async def probe(self, path: str, *, connect_timeout_s: float) -> dict[str, Any] | None:
        """As ``get``, but the caller bounds it; None when the engine does not know ``path``.

        Raises TimeoutError when a connection takes too long.
        """
        answer, content = await self._probe("GET", path, b"", connect_timeout_s)
        return None if answer.status == HTTPStatus.NOT_FOUND else self._object(answer, content)

    async def knows(self, path: str, *, connect_timeout_s: float) -> bool:
        """Whether the engine has a verb at ``path``: it is asked for nothing, which it refuses. Raises as ``probe``."""
        answer, _ = await self._probe("POST", path, b"{}", connect_timeout_s)
        return answer.status != HTTPStatus.NOT_FOUND

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """The JSON object that answers ``body``. Raises as ``get``."""
        return self._object(*await self._exchange("POST", path, dump(body), timeout_s))

    def fetch(
        self, path: str, body: bytes, *, timeout_s: float
    ) -> Coroutine[Any, Any, tuple[int, Mapping[bytes, bytes], bytes]]:
        """The answer's status, headers (unless the status is 200: then there is no ``refusal``) and bytes. Raises
        TimeoutError and ConnectionFailedError, of which ``lost`` knows the meaning: a coroutine less than ``post``."""
        return self._connections.post(path, body, limit_s=timeout_s)

    async def post_if_known(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float
    ) -> dict[str, Any] | None:
        """As ``post``; None when the engine does not know ``path``."""
        answer, content = await self._exchange("POST", path, dump(body), timeout_s)
        return None if answer.status == HTTPStatus.NOT_FOUND else self._object(answer, content)

    async def open_stream(self, path: str, body: bytes, *, silence_s: float) -> Answer:
        """An answer whose ``next_piece`` is to be asked for; no gap may be longer than ``silence_s``. Raises as ``get``.

        Read to its end, the connection can be used again; closed earlier, the engine sees us leave.
        """
        self.check_open()
        try:
            answer = await self._connections.send(
                "POST", path, headers=_JSON, content=body, limit_s=silence_s, per_piece=True
            )
        except (TimeoutError, ConnectionFailedError) as error:
            raise self.lost(error) from None
        if answer.status == 200:
            return answer
        try:
            raise self.refusal(answer.status, answer.headers, await _read(answer))
        except (TimeoutError, ConnectionFailedError) as error:
            raise self.lost(error) from None

    async def while_answering(self, work: Awaitable[ResultT]) -> ResultT:
        """``work``, which needs this engine without asking it. Raises EngineUnavailable once it is given up."""
        wait = _Wait()
        self._waits.add(wait)
        if self._given_up:
            asyncio.get_running_loop().call_soon(wait.end)
        try:
            return await work
        except asyncio.CancelledError:
            if wait.settle():
                raise self.lost(TimeoutError()) from None
            raise
        finally:
            wait.over = True
            self._waits.discard(wait)

    def came_back(self) -> None:
        """It answers again."""
        self._given_up = False

    def give_up(self, why: str) -> None:
        """Fail everything that waits for this engine now. why: goes on after the engine's name in the message."""
        self._given_up = True
        self._silence = why
        self._end_waits()

    def shut_down(self) -> None:
        """This server was told to stop: streams, and whatever waits for the engine now, end with ShuttingDown."""
        self._shutting_down = True
        self._end_waits()

    def check_open(self) -> None:
        """Before something new is begun. Raises ShuttingDown."""
        if self._shutting_down:
            raise ShuttingDown

    def _end_waits(self) -> None:
        for wait in self._waits:
            wait.end()
        self._connections.fail_all(TimeoutError())

    async def close(self) -> None:
        """Idempotent."""
        await self._connections.close()

    def seen_by_client(self, error: MicroservingError) -> MicroservingError:
        """What an engine's ``error`` means for the client of the router."""
        cls = _SEEN_AS.get(type(error))
        if cls is None:
            return error
        param = error.param if isinstance(error, RequestConflict) else None
        return cls(f"{self.name}: {error.message}", param=param, retry_after_s=error.retry_after_s)

    def broken(self, what: str) -> EngineUnavailable:
        """The engine answered, but wrongly."""
        return EngineUnavailable(f"{self.name} {what}")

    async def _exchange(
        self, method: str, path: str, content: bytes, timeout_s: float
    ) -> tuple[Answer, bytes]:
        headers = _JSON if content else None
        try:
            answer = await self._connections.send(
                method, path, headers=headers, content=content, limit_s=timeout_s
            )
            return answer, await _read(answer)
        except (TimeoutError, ConnectionFailedError) as error:
            raise self.lost(error) from None

    async def _probe(
        self, method: str, path: str, content: bytes, connect_timeout_s: float
    ) -> tuple[Answer, bytes]:
        headers = _JSON if content else None
        try:
            answer = await self._connections.send(
                method, path, headers=headers, content=content, connect_timeout_s=connect_timeout_s
            )
            return answer, await _read(answer)
        except ConnectTimeoutError:
            self.check_open()
            raise TimeoutError from None
        except (TimeoutError, ConnectionFailedError) as error:
            raise self.lost(error) from None

    def _object(self, answer: Answer, content: bytes) -> dict[str, Any]:
        if answer.status != 200:
            raise self.refusal(answer.status, answer.headers, content)
        body = _json_object(content)
        if body is None:
            raise self.broken("answered something that is not a JSON object")
        return body

    def lost(self, error: Exception) -> MicroservingError:
        """What the failure of a connection means. Raises ShuttingDown when that is why."""
        self.check_open()
        if isinstance(error, TimeoutError):
            return self.broken(self._silence)
        if isinstance(error, ConnectTimeoutError):
            # Busy, it or we; whether it is gone is for the probes to find out.
            return Overloaded(f"{self.name} took no connection in time", retry_after_s=1.0)
        if isinstance(error, CannotConnectError):
            self._on_unreachable(f"cannot connect: {_reason(error)}")
            return self.broken("cannot be reached")
        self._on_unreachable(f"the connection broke: {_reason(error)}")
        return self.broken("broke the connection")

    def refusal(self, status: int, headers: Mapping[bytes, bytes], content: bytes) -> MicroservingError:
        """What an answer with another status than 200 stands for."""
        body = _json_object(content) or {}
        error = body.get("error")
        if not isinstance(error, dict):
            return self.broken(f"answered with status {status}")
        refusal = error_from_body(status, error)
        refusal.retry_after_s = _seconds(headers.get(b"retry-after"))
        return self.seen_by_client(refusal)


class _Wait:
    """The running task's wait, which may be ended from elsewhere."""

    __slots__ = ("_cancelling", "_task", "ended", "over")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # in a coroutine
        self._task = task
        self._cancelling = task.cancelling()
        self.ended = self.over = False

    def end(self) -> None:
        """Idempotent."""
        if not self.ended and not self.over:
            self.ended = True
            self._task.cancel()

    def settle(self) -> bool:
        """Afterwards, when it was cancelled: whether only ``end`` did it."""
        return self.ended and self._task.uncancel() <= self._cancelling


async def _read(answer: Answer) -> bytes:
    """The body; the answer is closed, its headers are kept."""
    try:
        return await answer.read()
    finally:
        await answer.close()


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _seconds(header: bytes | None) -> float | None:
    return float(header) if header is not None and header.isdigit() else None
