"""Engines over a fake model, in this process but over real HTTP: a loop in a thread, one port per engine."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import httpx
import uvicorn

from microserving.engine.config import EngineConfig
from microserving.engine.fake_runner import TINY_LAYOUT, FakeRunner
from microserving.front import bind_listener
from microserving.front.http_protocol import BoundedHeadProtocol
from microserving.server.node import EngineNode, EngineParts
from microserving.tokenizer import Tokenizer
from microserving.transports import Transport
from microserving.transports.fake import FakeNetwork, FakeTransport

MODEL = "tiny"
SECRET = b"a secret of at least sixteen bytes"


class ByteDetokenizer:
    def put(self, token_id: int, /) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


class ByteTokenizer:
    """Token id = Latin-1 code. Nothing ends a generation by itself."""

    vocab_size = 256
    text_bytes_per_token = 1
    eos_token_ids: frozenset[int] = frozenset()
    chat_unavailable: str | None = None
    chat_template: str | None = None
    tool_call_format = reasoning_format = "auto"

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_context: int | None = None
    ) -> list[int]:
        return list(text.encode("latin-1"))

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, max_context: int | None = None) -> list[int]:
        return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages))

    special_token_ids: frozenset[int] = frozenset()
    strips_first_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,))

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "bytes"}


def make_node(
    name: str, transport: Transport, *, pages: int = 64, secret: bytes | None = SECRET, **config: Any
) -> tuple[EngineNode, FakeRunner]:
    memory = transport.allocate(pages * TINY_LAYOUT.bytes_per_page)
    runner = FakeRunner(total_pages=pages, memory=memory)
    parts = EngineParts(
        runner=runner,
        tokenizer=cast(Tokenizer, ByteTokenizer()),
        transport=transport,
        layout=TINY_LAYOUT,
        model_name=MODEL,
        model_hash="0123456789abcdef",
        secret=secret,
    )
    return EngineNode(EngineConfig(node_id=name, chunk_size_tokens=32, threads=1, **config), parts), runner


@dataclass
class Running:
    """An engine that answers on ``port``."""

    node: EngineNode
    runner: FakeRunner
    port: int
    http: httpx.Client

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def verb(self, name: str, **body: Any) -> httpx.Response:
        return self.post(f"/microserving/{name}", {"model": MODEL, **body})

    def load(self) -> dict[str, Any]:
        return dict(self.http.get("/microserving/load").json())

    def wait_for(self, **values: int) -> None:
        """Until the load shows ``values``; fails after 5 s."""
        deadline = time.monotonic() + 5
        while {name: (load := self.load())[name] for name in values} != values:
            assert time.monotonic() < deadline, load

    def wait_idle(self) -> None:
        """Nothing is held but by the prefix cache."""
        self.wait_for(
            running=0,
            waiting=0,
            reserved=0,
            pinned_pages=0,
            running_pages=0,
            reserved_pages=0,
            quarantined_pages=0,
        )
        self.node.services.engine.engine.check()


@contextmanager
def engines(*nodes: tuple[EngineNode, FakeRunner]) -> Iterator[list[Running]]:
    """Serve ``nodes`` until the end of the context; all live in one loop on another thread."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(bind_listener("127.0.0.1", 0)) for _ in nodes]
        for listener in listeners:
            listener.listen()
        servers = [_server(node) for node, _ in nodes]
        thread = threading.Thread(
            target=lambda: asyncio.run(_serve([node for node, _ in nodes], servers, listeners))
        )
        thread.start()
        try:
            running = []
            for (node, runner), listener in zip(nodes, listeners, strict=True):
                port = listener.getsockname()[1]
                client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20)
                running.append(Running(node, runner, port, stack.enter_context(client)))
            yield running
        finally:
            for server in servers:
                server.should_exit = True
            thread.join()


def _server(node: EngineNode) -> uvicorn.Server:
    options: dict[str, Any] = {"lifespan": "off", "log_config": None, "timeout_graceful_shutdown": 2}
    return uvicorn.Server(uvicorn.Config(node.create_app(), http=BoundedHeadProtocol, ws="none", **options))


async def _serve(
    nodes: Sequence[EngineNode], servers: Sequence[uvicorn.Server], listeners: Sequence[socket.socket]
) -> None:
    for node in nodes:
        await node.start()
    try:
        await asyncio.gather(*(s.serve(sockets=[one]) for s, one in zip(servers, listeners, strict=True)))
    finally:
        for node in nodes:
            await node.stop()


@contextmanager
def prefill_and_decode(network: FakeNetwork | None = None, **config: Any) -> Iterator[list[Running]]:
    """A prefill engine and a decode engine that reach each other; the decode engine's pool is smaller."""
    network = network or FakeNetwork()
    prefill = make_node("prefill-0", FakeTransport(network=network), pages=64)
    decode = make_node("decode-0", FakeTransport(network=network), pages=48, **config)
    with engines(prefill, decode) as running:
        yield running
