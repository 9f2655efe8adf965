"""The output of one generation as it comes from an engine: parsed where it arrives, before any task is woken.

The connection hands over what it read (``_heard``); the chunks in it go into a queue, and whoever waits is woken once they
are there. So a token costs one callback and one step of the program's task. Knows the stream's format by its reader; what
a failure means is ``engine_http``'s, what it says of the engine the caller's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine

from microserving.errors import MicroservingError
from microserving.protocol.generation import GenerationChunk
from microserving.protocol.generation_stream import GenerationStreamReader
from microserving.protocol.sse import SSEParser
from microserving.router.chunk_stream import ChunkStream
from microserving.router.connection import HIGH_WATER_BYTES
from microserving.router.connections import Answer
from microserving.router.engine_http import EngineHTTP


class EngineStream(ChunkStream):
    """Read once; nothing is sent before the first step. The engine sees us leave when a step is cancelled, when the
    stream is closed (``aclose``) before its end, and when it sends something wrong. What came before a failure is given
    out before that is raised.

    answered: called when the first piece has come. failed: called with what went wrong; what is to be raised for it.
    """

    __slots__ = (
        "_answer",
        "_answered",
        "_begun",
        "_body",
        "_chunks",
        "_error",
        "_failed",
        "_held",
        "_http",
        "_loop",
        "_over",
        "_parser",
        "_path",
        "_paused",
        "_reader",
        "_silence_s",
        "_waiter",
    )

    def __init__(
        self,
        http: EngineHTTP,
        path: str,
        body: bytes,
        reader: GenerationStreamReader,
        *,
        silence_s: float,
        answered: Callable[[], None],
        failed: Callable[[MicroservingError], MicroservingError],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._http = http
        self._path = path
        self._body = body
        self._reader = reader
        self._silence_s = silence_s
        self._answered = answered
        self._failed = failed
        self._parser = SSEParser()
        self._chunks: deque[GenerationChunk] = deque()
        self._held = 0  # bytes that the queued chunks came in
        self._paused = False
        self._answer: Answer | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: MicroservingError | None = None
        self._begun = self._over = False

    def take(self) -> GenerationChunk | None:
        if self._chunks:
            return self._chunks.popleft()
        if self._over:
            error, self._error = self._error, None
            raise StopAsyncIteration if error is None else error
        return None

    def more(self) -> asyncio.Future[None] | Coroutine[None, None, None]:
        """The first wait is for the engine's answer."""
        answer = self._answer
        if answer is None:
            return self._open()
        self._held = 0
        if self._paused:
            self._paused = False
            answer.read_on()
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def leave(self) -> None:
        self._over = True
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.let_go()

    async def aclose(self) -> None:
        """Who waits in ``more`` (another task) finds the end."""
        self.leave()
        self._chunks.clear()
        self._error = None
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _open(self) -> None:
        try:
            answer = await self._http.open_stream(self._path, self._body, silence_s=self._silence_s)
        except MicroservingError as error:
            self._over = True
            raise self._failed(self._http.seen_by_client(error)) from None
        if self._over:  # closed meanwhile by another task
            answer.let_go()
            return
        self._answer = answer
        answer.listen(self._heard)

    def _heard(self, piece: bytes, whole: bool, error: Exception | None) -> None:
        """Of the connection: a piece came, the last one perhaps, or it failed."""
        http = self._http
        try:
            if piece:
                self._take(piece)
            if error is not None:
                raise http.lost(error)
            if whole:
                if not self._reader.done:
                    raise http.broken("ended the stream early")
                self.leave()
        except MicroservingError as failure:
            self.leave()
            self._error = self._failed(http.seen_by_client(failure))
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        elif self._held > HIGH_WATER_BYTES and self._answer is not None and not self._paused:
            self._paused = True
            self._answer.pause()

    def _take(self, piece: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._answered()
        reader, chunks = self._reader, self._chunks
        self._held = self._held + len(piece) if chunks else len(piece)
        for data in self._parser.feed(piece):
            chunks += reader.feed(data)
