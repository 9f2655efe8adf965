"""A backend that plays a script, a byte tokenizer, and an app on a real port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from microserving.front import bind_listener
from microserving.front.backend import ServedModel
from microserving.grammar import GrammarCompiler
from microserving.protocol.generation import FinishReason, GenerationChunk, GenerationRequest
from microserving.protocol.sse import SSEParser

MODEL = ServedModel(id="org/tiny", max_context=64, created=1700000000)
Script = Callable[[GenerationRequest], AsyncIterator[GenerationChunk]]


class ByteTokenizer:
    """Token id = UTF-8 byte."""

    vocab_size = 256
    text_bytes_per_token = 1
    chat_template: str | None = None
    tool_call_format = reasoning_format = "auto"

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_context: int | None = None
    ) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, max_context: int | None = None) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages))


def pieces(texts: Sequence[str], finish: FinishReason = "stop") -> Script:
    """Each text is one token; the last chunk ends the generation."""

    async def play(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        for i, text in enumerate(texts):
            last = i == len(texts) - 1
            await asyncio.sleep(0)
            yield GenerationChunk(
                text, (i + 1,), finish if last else None, len(request.prompt_token_ids), i + 1
            )

    return play


class ScriptedBackend:
    """``script`` makes the chunks. Counts the generations that run; ``changed`` is notified when that changes."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or pieces(["Hello", " wor", "ld"])
        self.model: ServedModel | None = MODEL
        self.tokenizer: Any = ByteTokenizer()
        self.ready = True
        self.ready_after_refresh = False
        self.requests: list[GenerationRequest] = []
        self.most_at_once = 0
        self.active = 0
        self._changed = threading.Condition()

    @property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer)

    async def refresh(self) -> None:
        self.ready = self.ready or self.ready_after_refresh

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        self.requests.append(request)
        self._count(1)
        try:
            async for chunk in self.script(request):
                yield chunk
        finally:
            self._count(-1)

    def wait_active(self, number: int) -> bool:
        """Whether ``number`` generations run within 5 s."""
        with self._changed:
            return self._changed.wait_for(lambda: self.active == number, timeout=5)

    def _count(self, change: int) -> None:
        with self._changed:
            self.active += change
            self.most_at_once = max(self.most_at_once, self.active)
            self._changed.notify_all()


def call(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    """One request without a socket; the whole answer."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def events(response: httpx.Response) -> list[str]:
    return SSEParser().feed(response.content)


@contextmanager
def live(app: ASGIApp, **options: Any) -> Iterator[int]:
    """``app`` on a real port of the loopback interface, served by another thread. Yields the port."""
    listener = bind_listener("127.0.0.1", 0)
    listener.listen()
    common = {"log_config": None, "lifespan": "off", "proxy_headers": False, "timeout_graceful_shutdown": 2}
    config = uvicorn.Config(app, **(common | options))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def raw_request(path: str, body: bytes, *, headers: str = "") -> bytes:
    """An HTTP/1.1 POST as bytes."""
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body
