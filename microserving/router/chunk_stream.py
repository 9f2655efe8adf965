"""How a generation is read in the router: take what is there, else wait for more.

Two steps instead of one ``__anext__``, so that nothing is made for a chunk that has come already, and one thing for a
wait: this is done for every token. Does not know where chunks come from.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable

from microserving.protocol.generation import GenerationChunk


class ChunkStream(AsyncIterator[GenerationChunk]):
    """Iterate; or ``take``, and after a None await ``more`` before the next one. Either raises StopAsyncIteration at the
    end and the error that ended it before. Who does not read on calls ``leave``, or awaits ``aclose``."""

    __slots__ = ()

    @abstractmethod
    def take(self) -> GenerationChunk | None:
        """The next chunk; None when there is none yet."""

    @abstractmethod
    def more(self) -> Awaitable[None]:
        """Wait for something to take."""

    @abstractmethod
    def leave(self) -> None:
        """Nobody reads on. Idempotent; after the end nothing is left to do."""

    @abstractmethod
    async def aclose(self) -> None:
        """``leave``, and wait until all is freed."""

    async def __anext__(self) -> GenerationChunk:
        try:
            while (chunk := self.take()) is None:
                await self.more()
        except BaseException:
            self.leave()
            raise
        return chunk


class PulledStream(ChunkStream):
    """Any other iterator as one."""

    __slots__ = ("_chunks", "_next")

    def __init__(self, chunks: AsyncIterator[GenerationChunk]) -> None:
        self._chunks = chunks
        self._next: GenerationChunk | None = None

    def take(self) -> GenerationChunk | None:
        chunk, self._next = self._next, None
        return chunk

    async def more(self) -> None:
        self._next = await self._chunks.__anext__()

    def leave(self) -> None:
        """An iterator that was left in a wait has been told by the exception."""

    async def aclose(self) -> None:
        await close(self._chunks)


def readable(chunks: AsyncIterator[GenerationChunk]) -> ChunkStream:
    """``chunks`` as a ``ChunkStream``."""
    return chunks if isinstance(chunks, ChunkStream) else PulledStream(chunks)


async def close(chunks: AsyncIterator[object]) -> None:
    """Close ``chunks`` when it can be closed (an async generator can), unless it has ended."""
    if getattr(chunks, "ag_frame", chunks) is None:
        return
    aclose = getattr(chunks, "aclose", None)
    if aclose is not None:
        await aclose()
