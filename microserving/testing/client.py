"""One client of a run: reads its stream, leaves when it is told to, and remembers what it saw."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from microserving.protocol.generation import GenerationChunk, GenerationRequest
from microserving.router.dispatch import Dispatcher


class Client:
    """Times are virtual seconds. left, ended: None until then. error: what the stream raised. after_leaving: chunks that it
    got although it had left. stuck: nobody waits for its end any more."""

    def __init__(self, request: GenerationRequest, dispatcher: Dispatcher, starts_at: float = 0.0) -> None:
        self.request = request
        self.chunks: list[GenerationChunk] = []
        self.error: Exception | None = None
        self.left: float | None = None
        self.ended: float | None = None
        self.after_leaving = 0
        self.stuck = False
        self._closing = False
        self._dispatcher = dispatcher
        self._loop = asyncio.get_running_loop()
        self._starts_at = starts_at
        self.task = asyncio.create_task(self._read(), name=f"client {request.request_id}")

    def leave(self) -> None:
        """Be cancelled at the next turn of the loop. Idempotent."""
        if self.left is None and self.ended is None:
            self.left = self._loop.time()
            self._loop.call_soon(self.task.cancel)

    def close_soon(self) -> None:
        """Close the stream after the next chunk."""
        self._closing = True

    async def _read(self) -> None:
        try:
            await asyncio.sleep(self._starts_at)
            async with aclosing(self._dispatcher.generate(self.request)) as chunks:
                async for chunk in chunks:
                    self.after_leaving += self.left is not None
                    self.chunks.append(chunk)
                    if self._closing:
                        self.left = self._loop.time()
                        break
        except Exception as error:  # noqa: BLE001 - the wall: whatever it is, it is a finding
            self.error = error
        finally:
            self.ended = self._loop.time()
