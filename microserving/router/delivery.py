"""What a client has been sent of one generation: enough to go on elsewhere without a gap or a duplicate.

A chunk's text is all that may be shown after its ids (``GenerationChunk``), so the ids alone say where to go on. Knows
nothing of engines or attempts.
"""

from __future__ import annotations

from dataclasses import replace

from microserving.protocol.generation import GenerationChunk, GenerationRequest

_UNLIMITED = 2**62


class Delivery:
    """``take`` every chunk on its way to the client.

    count: output tokens, those that the request resumes included. begun: it has seen output; finished: all of it. cut:
    the engine wanted to go on.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._given = len(request.resume_output_ids)
        self._ids = list(request.resume_output_ids)
        self._limit = _UNLIMITED if request.stop.max_tokens is None else request.stop.max_tokens
        self.count = self._given
        self._exact = True
        self.begun = False
        self.finished = False
        self.cut = False

    @property
    def output_ids(self) -> tuple[int, ...]:
        """What ``resume_output_ids`` of the next attempt are: those of the request itself, then all that was sent."""
        return tuple(self._ids)

    @property
    def tokens(self) -> int:
        """Output tokens sent."""
        return self.count - self._given

    @property
    def resumable(self) -> bool:
        """Whether the ids account for all of the text: engines of another make may send none."""
        return self._exact

    def take(self, chunk: GenerationChunk) -> GenerationChunk:
        """What the client gets of ``chunk``. No more than max_tokens: what an engine gives beyond is cut off, and the
        chunk is the last one."""
        ids = chunk.token_ids
        if ids:
            self._ids += ids
            self.count += len(ids)
            self.begun = True
            if self.count > self._limit:
                chunk = self._cut(chunk, self._limit)
        elif chunk.text:
            self.begun = True
            self._exact = self._exact and chunk.finish_reason is not None
        if chunk.finish_reason is not None:
            self.finished = True
            if chunk.completion_tokens < self.count:
                chunk = replace(chunk, completion_tokens=self.count)
        return chunk

    def _cut(self, chunk: GenerationChunk, limit: int) -> GenerationChunk:
        room = limit - (len(self._ids) - len(chunk.token_ids))
        self.cut = True
        del self._ids[limit:]
        self.count = limit
        text = chunk.text if room else ""
        return replace(
            chunk,
            text=text,
            token_ids=chunk.token_ids[:room],
            logprobs=chunk.logprobs[:room],
            finish_reason="length",
            completion_tokens=limit,
        )
