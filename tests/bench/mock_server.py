"""A model server whose times are known: as a ``Wire`` in virtual time, as an ``httpx`` transport, and over real sockets.

It writes down when each request came and when each piece of its answer left, on the loop's clock: the truth that the
bench is held to.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from microserving.bench.client import FailedRequestError

Clock = Callable[[], float]


@dataclass(frozen=True)
class Plan:
    """What one request gets: ``first_s`` until the first piece, then one after each of ``gaps``. status: not 200 = refused.

    piece_tokens: of each piece. cut: the connection ends before the answer does. usage: whether token counts are told,
    and so in a chunk without choices, as OpenAI does.
    """

    first_s: float = 0.2
    gaps: Sequence[float] = (0.02, 0.02, 0.02)
    status: int = 200
    piece_tokens: int = 1
    prompt_tokens: int = 7
    cut: bool = False
    usage: bool = True
    role_first: bool = False

    @property
    def output_tokens(self) -> int:
        return self.piece_tokens * (1 + len(self.gaps))


@dataclass
class Served:
    """One request as the server saw it, in seconds on the loop's clock."""

    body: dict[str, Any]
    plan: Plan
    came: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0


class MockServer:
    """plans: of the requests in the order of their coming. one_at_a_time: as a server with one slot; the others wait.

    stall: (begin, end) since ``start``: nothing leaves between them. owned_by: what it says of its model. looked_up: the
    paths of what was read; keys: the `Authorization` of requests, in lower case.
    """

    def __init__(
        self,
        plans: Iterator[Plan],
        *,
        one_at_a_time: bool = False,
        stall: tuple[float, float] | None = None,
    ) -> None:
        self.served: list[Served] = []
        self.owned_by = "somebody"
        self.looked_up: list[str] = []
        self.keys: list[bytes | None] = []
        self._plans = plans
        self._slot = asyncio.Semaphore(1 if one_at_a_time else 10**6)
        self._stall = stall
        self._began = asyncio.get_running_loop().time()

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """As ``bench.client.Wire``; the path tells the endpoint."""
        served = Served(json.loads(body), next(self._plans), _now())
        self.served.append(served)
        if served.plan.status != 200:
            raise FailedRequestError(f"{served.plan.status} overloaded")
        async with self._slot:
            async for data in self._answer(served, path.endswith("/chat/completions")):
                yield data

    async def _answer(self, served: Served, chat: bool) -> AsyncIterator[bytes]:
        plan = served.plan
        if plan.role_first:
            yield _event(_chunk(chat, None, role=True))
        for number, pause in enumerate((plan.first_s, *plan.gaps)):
            await self._pass(pause)
            if plan.cut and number == len(plan.gaps):
                return
            served.pieces.append(_now())
            yield _event(_chunk(chat, f"w{number} "))
        yield _event(_chunk(chat, "", finish="length"))
        if plan.usage:
            usage = {"prompt_tokens": plan.prompt_tokens, "completion_tokens": plan.output_tokens}
            total = plan.prompt_tokens + plan.output_tokens
            yield _event(_chunk(chat, None) | {"usage": usage | {"total_tokens": total}})
        served.ended = _now()
        yield b"data: [DONE]\n\n"

    async def _pass(self, pause: float) -> None:
        await asyncio.sleep(pause)
        if self._stall is not None:
            begin, end = (self._began + at for at in self._stall)
            if begin <= _now() < end:
                await asyncio.sleep(end - _now())


class Transport(httpx.AsyncBaseTransport):
    """The server behind ``httpx``, without a socket: works in virtual time."""

    def __init__(self, server: MockServer) -> None:
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        stream = self._server.stream(request.url.path, await request.aread())
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=_Bytes(stream))


class _Bytes(httpx.AsyncByteStream):
    def __init__(self, stream: AsyncGenerator[bytes, None]) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._stream:
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def listening(server: MockServer) -> AsyncIterator[str]:
    """Its base URL, on a free port of this machine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path = head.decode().split(" ")[:2]
                if method == "GET":
                    server.looked_up.append(path)
                    await _tell(writer, server, path)
                    continue
                fields = dict(line.lower().split(b": ", 1) for line in head.strip().split(b"\r\n")[1:])
                server.keys.append(fields.get(b"authorization"))
                body = await reader.readexactly(int(fields[b"content-length"]))
                await _write(writer, server, path, body)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"


async def _tell(writer: asyncio.StreamWriter, server: MockServer, path: str) -> None:
    """The model's name and owner; nothing else is known."""
    known = path == "/v1/models"
    body = b'{"data": [{"id": "mock", "owned_by": "%b"}]}' % server.owned_by.encode() if known else b"{}"
    writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (200 if known else 404, len(body), body))
    await writer.drain()


async def _write(writer: asyncio.StreamWriter, server: MockServer, path: str, body: bytes) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    async for data in server.stream(path, body):
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    writer.write(b"0\r\n\r\n")
    await writer.drain()


class Background:
    """The server in a thread of its own; ``url`` is where. A context."""

    def __init__(self, plans: Iterator[Plan]) -> None:
        self.url = ""
        self.server: MockServer
        self._plans = plans
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Background:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self.server = MockServer(self._plans)
        async with listening(self.server) as self.url:
            self._ready.set()
            await self._over.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _chunk(chat: bool, text: str | None, finish: str | None = None, role: bool = False) -> dict[str, Any]:
    """text None: of no choice (but the role's)."""
    choices: list[dict[str, Any]] = []
    if text is not None or role:
        content: dict[str, Any] = {"role": "assistant", "content": ""} if role else {"content": text}
        shown: dict[str, Any] = {"delta": content} if chat else {"text": text or ""}
        choices = [{"index": 0, "finish_reason": finish, "logprobs": None, **shown}]
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "a", "object": kind, "created": 1, "model": "mock", "choices": choices}
