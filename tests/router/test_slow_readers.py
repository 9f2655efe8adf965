"""A client that does not read: its engine is held back, others are served meanwhile, and nothing is lost when it goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx

from microserving.front import bind_listener
from microserving.front.serving import serving_beside
from microserving.router.app import Router
from microserving.router.config import RouterConfig

from .engine_server import DONE, USAGE, EngineServer, choice

PIECES, PIECE_BYTES = 64, 2**20
BODY = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 100}


class Output(list[bytes]):
    """What an engine sends. sent: how much of it was taken from it."""

    sent = 0

    def __iter__(self) -> Iterator[bytes]:
        for piece in super().__iter__():
            self.sent += 1
            yield piece


def test_who_does_not_read_holds_back_its_engine_and_nobody_else() -> None:
    """More than the kernel's buffers between engine, router and client can hold."""
    output = Output(choice("x" * PIECE_BYTES, [number]) for number in range(PIECES))
    output += [choice("!", [PIECES], "stop"), USAGE, DONE]

    async def scenario(engine: EngineServer, port: int) -> None:
        engine.stream = output  # type: ignore[assignment]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(BODY | {"stream": True}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        before = -1
        while not output.sent or before != output.sent:  # until the engine gets no further
            before = output.sent
            await asyncio.sleep(0.1)
        assert output.sent < PIECES
        engine.stream = [choice("a", [1], "stop"), USAGE, DONE]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as other:
            for _ in range(10):
                answer = await other.post("/v1/completions", json=BODY | {"stream": True})
                assert answer.text.count("data: [DONE]") == 1
        assert output.sent < PIECES
        letters, end = 0, b""
        async with asyncio.timeout(30):
            while b"data: [DONE]" not in end:
                piece = await reader.read(2**20)
                assert piece
                letters += piece.count(b"x")
                end = end[-20:] + piece
        assert letters >= PIECES * PIECE_BYTES
        assert output.sent == len(output)
        writer.close()

    async def main() -> None:
        async with EngineServer() as engine:
            config = RouterConfig(program="round_robin", decode_peers=(engine.url,))
            router = Router(config)
            await router.start()
            try:
                with bind_listener("127.0.0.1", 0) as listener:
                    async with serving_beside(router.app, listener):
                        await scenario(engine, listener.getsockname()[1])
            finally:
                await router.stop()

    asyncio.run(main())
