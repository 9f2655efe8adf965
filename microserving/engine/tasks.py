"""A live request between two steps: a generation or a send, what it puts into a step and what it makes of the result.

Owns: one request's output or progress. Does not know: the other requests, the lock, who gets pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from microserving.engine.jobs import SendDone, SendJob, StepTimes
from microserving.engine.output import OutputProcessor
from microserving.engine.runner import RemotePut, RunnerChunk
from microserving.engine.sampler import SamplingRow
from microserving.errors import InternalError, MicroservingError
from microserving.protocol.generation import GenerationChunk, SamplingParams
from microserving.scheduler import Chunk, Sequence, SequenceState

OnChunk = Callable[[GenerationChunk | MicroservingError], None]
OnSent = Callable[[SendDone | MicroservingError], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and what the client is shown of it (None = nothing yet)."""

    token_id: int
    chunk: GenerationChunk | None


@dataclass(slots=True, eq=False)
class Generation:
    """Lives until it has produced its last chunk, or is ended with an error."""

    sequence: Sequence
    sampling: SamplingParams
    output: OutputProcessor
    notify: OnChunk

    def runner_chunk(self, chunk: Chunk) -> RunnerChunk:
        tokens = self.sequence.tokens[chunk.start : chunk.start + chunk.length]
        return RunnerChunk(tokens, chunk.start, self.sequence.pages, needs_logits=chunk.last)

    def sampling_row(self) -> SamplingRow:
        return SamplingRow(self.sampling, self.sequence.tokens, self.sequence.prompt_length)

    def take(self, token: int | InternalError) -> SampledToken | InternalError:
        """Turn a sampled token into text. The wall: a fault in one request's text ends only that request."""
        if isinstance(token, InternalError):
            return token
        try:
            return SampledToken(token, self.output.put(token))
        except Exception:
            logger.exception("token %d of request %s has no text", token, self.sequence.request_id)
            return InternalError("a token could not be turned into text")


@dataclass(slots=True, eq=False)
class Send:
    """Lives until no put of it can happen any more.

    error: it was ended while in the running step; it is told so when the step is over.
    """

    sequence: Sequence
    job: SendJob
    notify: OnSent
    tokens_computed: int = 0
    steps: list[StepTimes] = field(default_factory=list)
    error: MicroservingError | None = None

    def runner_chunk(self, chunk: Chunk) -> RunnerChunk:
        tokens = self.sequence.tokens[chunk.start : chunk.start + chunk.length]
        return RunnerChunk(tokens, chunk.start, self.sequence.pages, needs_logits=False, put=self._put(chunk))

    def positions_to_send(self, chunk: Chunk) -> range:
        """Those of the chunk's positions that were not sent before a preemption already."""
        first = max(chunk.start, self.job.begin, self.sequence.computed_before)
        return range(first, max(first, chunk.start + chunk.length))

    def advance(self, chunk: Chunk, times: StepTimes) -> None:
        """The chunk was computed and put."""
        self.tokens_computed += chunk.length
        self.steps.append(times)

    def done(self, kv_bytes_per_token: int) -> SendDone:
        tokens = self.job.end - self.job.begin
        return SendDone(
            tokens_computed=self.tokens_computed,
            tokens_sent=tokens,
            bytes_sent=tokens * kv_bytes_per_token,
            steps=tuple(self.steps),
        )

    def _put(self, chunk: Chunk) -> RemotePut | None:
        sent = self.positions_to_send(chunk)
        if not sent:
            return None
        slots = np.full(chunk.length, -1, np.int32)
        here = slice(sent.start - chunk.start, sent.stop - chunk.start)
        slots[here] = self.job.slots[sent.start - self.job.begin : sent.stop - self.job.begin]
        return RemotePut(self.job.pool, slots, self.job.guard)


Task = Generation | Send


@dataclass(frozen=True, slots=True)
class Work:
    """One chunk of a step, and the request it belongs to."""

    chunk: Chunk
    task: Task

    @property
    def samples(self) -> bool:
        return self.chunk.last and isinstance(self.task, Generation)


@dataclass(frozen=True, slots=True)
class StepResult:
    """sampled: one for each work that samples, in order. failed: the step raised."""

    times: StepTimes
    sampled: Seq[SampledToken | InternalError] = ()
    failed: bool = False


def is_over(task: Task) -> bool:
    """It was ended (aborted) while in the running step."""
    return task.sequence.state is SequenceState.FINISHED
