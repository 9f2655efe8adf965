"""A live request between two steps: a generation or a send, what it puts into a step and what it makes of the result.

Owns: one request's output or progress. Does not know: the other requests, the lock, who gets pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from microserving.engine.constraint import unusable_grammar
from microserving.engine.jobs import SendDone, SendJob, StepTimes
from microserving.engine.logprobs import Logits, PromptScores, token_logprob
from microserving.engine.output import OutputProcessor
from microserving.engine.runner import RemotePut, RemoteTarget, RunnerChunk
from microserving.engine.sampler import SamplingRow
from microserving.errors import InternalError, MicroservingError
from microserving.grammar import GrammarError
from microserving.protocol.generation import GenerationChunk, SamplingParams
from microserving.scheduler import Chunk, Sequence, SequenceState

OnChunk = Callable[[GenerationChunk | MicroservingError], None]
OnSent = Callable[[SendDone | MicroservingError], None]
Slots = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token (None: no output was wanted) and what the client is shown of it (None = nothing yet)."""

    token_id: int | None
    chunk: GenerationChunk | None


@dataclass(slots=True, eq=False)
class Generation:
    """Lives until it has produced its last chunk, or is ended with an error.

    gives_back: a preemption ends it (finish reason ``preempt``). logprobs: with how many of the likeliest tokens each
    output token comes, None = without log-probabilities. scores: of the prompt, when they are wanted. last_token_at: when
    its last token was sampled here.
    """

    sequence: Sequence
    sampling: SamplingParams
    output: OutputProcessor
    notify: OnChunk
    gives_back: bool = False
    logprobs: int | None = None
    scores: PromptScores | None = None
    last_token_at: float | None = None

    @property
    def must_give_back(self) -> bool:
        """It lost its pages, and is not to be computed again here."""
        s = self.sequence
        return self.gives_back and s.started and s.handle is None and s.state is SequenceState.WAITING

    def runner_chunk(self, chunk: Chunk) -> RunnerChunk:
        tokens = self.sequence.tokens[chunk.start : chunk.start + chunk.length]
        return RunnerChunk(tokens, chunk.start, self.sequence.pages, logits=self._rows(chunk))

    def _rows(self, chunk: Chunk) -> int:
        """How many of the chunk's last tokens need logits."""
        end = chunk.start + chunk.length
        first = end - 1 if chunk.last and self.output.room else end
        if self.scores is not None:
            first = min(first, self.scores.first_wanted(chunk.start, end))
        return end - first

    def score_prompt(self, logits: Logits, chunk: Chunk) -> None:
        """logits: of the chunk's last tokens, as many as were wanted."""
        if self.scores is not None:
            self.scores.take(logits, chunk.start + chunk.length - len(logits))

    def sampling_row(self) -> SamplingRow:
        constraint = self.output.constraint
        allowed = None if constraint is None else constraint.allowed
        tokens, prompt_length = self.sequence.tokens, self.sequence.prompt_length
        return SamplingRow(self.sampling, tokens, prompt_length, allowed, self.output.forbidden)

    def take(self, token: int | InternalError, logits: Logits) -> SampledToken | MicroservingError:
        """Turn a sampled token into text. logits: those that it was drawn from, [vocabulary]. The wall: a fault in one
        request's text or grammar ends only that request. A grammar that does not say what follows is the request's
        own fault, wherever it is tried."""
        if isinstance(token, InternalError):
            return token
        if (error := self._begin_output()) is not None:
            return error
        try:
            logprob = None if self.logprobs is None else token_logprob(logits, token, self.logprobs)
            return SampledToken(token, self.output.put(token, logprob))
        except GrammarError as error:
            logger.info("the grammar of request %s fails: %s", self.sequence.request_id, error)
            return unusable_grammar()
        except Exception:
            logger.exception("token %d of request %s cannot be taken", token, self.sequence.request_id)
            return InternalError("a token could not be turned into text")

    def end_of_prompt(self) -> SampledToken | MicroservingError:
        """The prompt is computed, and no output is wanted."""
        return self._begin_output() or SampledToken(None, self.output.nothing())

    def _begin_output(self) -> InternalError | None:
        """What is known of the prompt, for the next chunk. Returns what is wrong with it."""
        output, sequence = self.output, self.sequence
        output.cached_tokens = min(sequence.cached_tokens, sequence.prompt_length)
        if self.scores is None:
            return None
        if (known := self.scores.tell()) is not None:
            output.prompt_logprobs = known
        return self.scores.error


@dataclass(frozen=True, slots=True)
class CachedPut:
    """K/V that is in our pool already and goes to the receiver. source, target: int32 [n] slots, ours and the
    receiver's."""

    source: Slots
    target: Slots
    remote: RemoteTarget


@dataclass(slots=True, eq=False)
class Send:
    """Lives until no put of it can happen any more.

    sent_until: positions [job.begin, sent_until) are at the receiver, each put once whatever was computed how often.
    error: it was ended while in the running step; it is told so when the step is over.
    """

    sequence: Sequence
    job: SendJob
    notify: OnSent
    tokens_computed: int = 0
    sent_until: int = field(init=False)
    steps: list[StepTimes] = field(default_factory=list)
    error: MicroservingError | None = None

    def __post_init__(self) -> None:
        self.sent_until = self.job.begin

    @property
    def complete(self) -> bool:
        return self.sent_until == self.job.end

    def runner_chunk(self, chunk: Chunk) -> RunnerChunk:
        tokens = self.sequence.tokens[chunk.start : chunk.start + chunk.length]
        return RunnerChunk(tokens, chunk.start, self.sequence.pages, logits=0, put=self._put(chunk))

    def cached_put(self, chunk: Chunk, page_size: int) -> CachedPut | None:
        """What of the chunk was found in the cache and is not at the receiver yet."""
        if chunk.cached_from > self.sent_until:
            raise InternalError(f"positions below {chunk.cached_from} were not sent")
        positions = np.arange(self.sent_until, max(self.sent_until, chunk.start))
        if not positions.size:
            return None
        pages = np.asarray(self.sequence.pages, np.int32)
        source = pages[positions // page_size] * page_size + positions % page_size
        target = self.job.slots[positions - self.job.begin]
        return CachedPut(source.astype(np.int32), target, RemoteTarget(self.job.pool, self.job.guard))

    def advance(self, chunk: Chunk, times: list[StepTimes]) -> int:
        """The chunk was computed and put, which took ``times``; returns how many positions were put."""
        end = chunk.start + chunk.length
        sent = max(0, end - self.sent_until)
        self.sent_until += sent
        self.tokens_computed += chunk.length
        self.steps += times
        return sent

    def done(self, kv_bytes_per_token: int) -> SendDone:
        tokens = self.job.end - self.job.begin
        return SendDone(
            tokens_computed=self.tokens_computed,
            prefix_matched_length=self.sequence.cached_tokens,
            tokens_sent=tokens,
            bytes_sent=tokens * kv_bytes_per_token,
            steps=tuple(self.steps),
        )

    def _put(self, chunk: Chunk) -> RemotePut | None:
        first, end = max(chunk.start, self.sent_until), chunk.start + chunk.length
        if first >= end:
            return None
        slots = np.full(chunk.length, -1, np.int32)
        slots[first - chunk.start :] = self.job.slots[first - self.job.begin : end - self.job.begin]
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


def is_over(task: Task) -> bool:
    """It was ended (aborted) while in the running step."""
    return task.sequence.state is SequenceState.FINISHED
