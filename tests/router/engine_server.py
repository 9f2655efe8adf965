"""A scripted engine behind a real socket: speaks the verbs over HTTP, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

INFO: dict[str, Any] = {
    "protocol_version": 1,
    "engine_id": "decode-0",
    "epoch": "e1",
    "rank": 0,
    "node_role": "decode",
    "model": "tiny",
    "model_hash": "m1",
    "kv_layout_hash": "l1",
    "kv_bytes_per_token": 64,
    "page_size": 16,
    "total_pages": 100,
    "max_context": 512,
    "created": 7,
    "transports": {},
}
LOAD: dict[str, Any] = {
    "running": 1,
    "free_pages": 40,
    "total_pages": 100,
    "decode_step_ms": 2.5,
    "counters": {},
}


def tokenizer_document(words: int = 100) -> dict[str, Any]:
    """A tokenizer of the words t0, t1, ... as an engine hands it out (``Tokenizer.from_dict``)."""
    library = Library(WordLevel({f"t{i}": i for i in range(words)}, unk_token="t0"))
    library.pre_tokenizer = Whitespace()
    lists: dict[str, Any] = {"eos_token_ids": [1], "prefix_ids": [], "suffix_ids": [], "special_tokens": {}}
    facts = {"version": 1, "bos_token_id": None, "chat_template": None}
    return {"tokenizer": library.to_str()} | facts | lists


def event(body: dict[str, Any] | str) -> bytes:
    return f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n".encode()


def choice(text: str, ids: list[int], finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": finish}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}})
DONE = event("[DONE]")
STREAM = [choice("Hel", [1]), choice("lo", [2], "stop"), USAGE, DONE]


def whole(pieces: list[bytes]) -> dict[str, Any]:
    """What a stream would have said, in one body."""
    answer: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": None}
    usage = None
    for line in b"".join(pieces).decode().split("\n\n"):
        body = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
        for part in body.get("choices", ()):
            answer["text"] += part["text"]
            answer["token_ids"] += part.get("token_ids", [])
            answer["finish_reason"] = part["finish_reason"]
        usage = body.get("usage", usage)
    return {"choices": [{"index": 0, **answer}], "usage": usage}


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class EngineServer:
    """``async with EngineServer() as engine``. Change ``info``, ``load``, ``ready``, ``stream`` and ``answers`` at will.

    answers: verb or path -> (status, JSON body, headers), instead of the usual one. thawed: while it is
    not set nothing is answered (frozen_by tells that a request met that). stream: what `start_generate` sends; an
    exception in it breaks the connection, an event is waited for. stream_left: a stream ended, or its client left.
    heads: path and headers of every request.
    """

    def __init__(self, port: int = 0, keep_alive_s: int = 5, **info: Any) -> None:
        self.info = INFO | info
        self.load = dict(LOAD)
        self.tokenizer = tokenizer_document()
        self.ready = True
        self.stream: list[bytes | Exception | asyncio.Event] = list(STREAM)
        self.answers: dict[str, tuple[int, Any, dict[str, str]]] = {}
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.connections: set[tuple[str, int]] = set()
        self.requests: list[str] = []
        self.heads: list[tuple[str, dict[str, str]]] = []
        self.stream_left = asyncio.Event()
        self.frozen_by = asyncio.Event()
        self._port = port
        self._keep_alive_s = keep_alive_s

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.bodies]

    async def __aenter__(self) -> EngineServer:
        # with its protocol named, asyncio sets TCP_NODELAY; without it every answer takes 40 ms
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            Starlette(routes=self._routes()),
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_keep_alive=self._keep_alive_s,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self._server.listening.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Close everything at once, as the kernel does for a process that was killed. Idempotent."""
        self.thawed.set()
        self._serving.cancel()  # uvicorn's own way takes two tenths of a second
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        for task in list(self._server.server_state.tasks):
            task.cancel()
        await asyncio.wait([self._serving, *self._server.server_state.tasks])

    def _routes(self) -> list[Route]:
        get: dict[str, Callable[[], Any]] = {
            "/ready": lambda: {"status": "ready"},
            "/microserving/info": lambda: self.info,
            "/microserving/load": lambda: self.load,
            "/microserving/tokenizer": lambda: self.tokenizer,
        }
        verbs = {
            "prep_recv": {"kv_append_metadata": "META", "prefix_matched_length": 0, "lease_ttl_s": 30.0},
            "remote_send": {"tokens_computed": 3, "tokens_sent": 3, "bytes_sent": 192, "prefill_ms": 1.5},
            "abort": {},
            "renew": {"request_id": "r", "lease_ttl_s": 20.0},
            "match_prefix": {"prefix_matched_length": 2},
        }
        routes = [Route(path, self._get(path, body)) for path, body in get.items()]
        routes += [Route(f"/microserving/{v}", self._post(v, b), methods=["POST"]) for v, b in verbs.items()]
        routes.append(Route("/microserving/start_generate", self._start_generate, methods=["POST"]))
        return routes

    def _get(self, path: str, body: Callable[[], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            await self._arrived(request)
            if path == "/ready" and not self.ready:
                return JSONResponse({"error": {"message": "not yet", "code": "no_engine"}}, status_code=503)
            return self._scripted(path) or JSONResponse(body())

        return answer

    def _post(self, verb: str, body: dict[str, Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            self.bodies.append((verb, await request.json()))
            await self._arrived(request)
            return self._scripted(verb) or JSONResponse(body)

        return answer

    async def _start_generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(("start_generate", body))
        await self._arrived(request)
        if (scripted := self._scripted("start_generate")) is not None:
            return scripted
        if body.get("stream"):
            return StreamingResponse(self._pieces(), media_type="text/event-stream")
        return StreamingResponse(self._whole(), media_type="application/json")

    async def _whole(self) -> Any:
        yield json.dumps(whole([piece async for piece in self._pieces()]))

    async def _pieces(self) -> Any:
        try:
            for piece in self.stream:
                if isinstance(piece, asyncio.Event):
                    await piece.wait()
                elif isinstance(piece, Exception):
                    for connection in list(self._server.server_state.connections):
                        connection.transport.abort()  # type: ignore[union-attr]
                    return
                else:
                    yield piece
        finally:
            self.stream_left.set()

    def _scripted(self, name: str) -> Response | None:
        if name not in self.answers:
            return None
        status, body, headers = self.answers[name]
        if isinstance(body, bytes):
            return Response(body, status_code=status, headers=headers)
        return JSONResponse(body, status_code=status, headers=headers)

    async def _arrived(self, request: Request) -> None:
        assert request.client is not None
        self.requests.append(request.url.path)
        self.heads.append((request.url.path, dict(request.headers)))
        self.connections.add((request.client.host, request.client.port))
        if not self.thawed.is_set():
            self.frozen_by.set()
        await self.thawed.wait()
