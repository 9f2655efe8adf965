"""One step, executed: page copies, puts of cached K/V, the model, sampling.

Owns: the order of these, and the wall around them. Does not know: the books, the lock, who is told what. It runs on the
engine's thread; the pages of a step stay as they are until the step is complete.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from microserving.engine.jobs import StepTimes
from microserving.engine.logprobs import Logits
from microserving.engine.runner import ModelRunner, RunnerChunk
from microserving.engine.sampler import sample
from microserving.engine.tasks import Generation, SampledToken, Send, Work
from microserving.errors import InternalError, MicroservingError
from microserving.scheduler import PageCopy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """sampled: one for each work that samples, in order. puts: of cached K/V, by work. times: the model's run.

    failed: the step raised, nothing of it counts.
    """

    times: StepTimes
    sampled: Sequence[SampledToken | MicroservingError] = ()
    puts: Sequence[StepTimes | None] = ()
    failed: bool = False

    def send_times(self, index: int, *, ran: bool) -> list[StepTimes]:
        """What work ``index``, a send, took part in. ran: it had tokens to compute."""
        put = self.puts[index]
        return [*([] if put is None else [put]), *([self.times] if ran else [])]


class Executor:
    """vocab_size: ids from there on are never sampled. now_ns: CLOCK_MONOTONIC, as the runner's layer times are."""

    def __init__(
        self, runner: ModelRunner, vocab_size: int, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._now_ns = now_ns

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Make page copies within the pool."""
        size = self._runner.page_size
        source: list[npt.NDArray[np.int32]] = []
        target: list[npt.NDArray[np.int32]] = []
        for copy in copies:
            offsets = np.arange(copy.tokens, dtype=np.int32)
            source.append(copy.source_page * size + offsets)
            target.append(copy.target_page * size + offsets)
        if source:
            self._runner.copy_slots(np.concatenate(source), np.concatenate(target))

    def execute(self, batch: Sequence[Work], copies: Iterable[PageCopy]) -> StepResult:
        """The wall: what goes wrong in here ends this step's requests and nothing else."""
        begin_ns = self._now_ns()
        try:
            self.copy(copies)
            puts = [self._put_cached(work) for work in batch]
            begin_ns = self._now_ns()
            chunks = [work.task.runner_chunk(work.chunk) for work in batch if work.chunk.length > 0]
            output = self._runner.run(chunks) if chunks else None
            end_ns = self._now_ns()
            sampled = [] if output is None else self._results(batch, chunks, output.logits)
        except Exception:
            ids = [work.task.sequence.request_id for work in batch]
            logger.exception("a step failed; its requests end with an error: %s", ids)
            return StepResult(StepTimes(begin_ns, self._now_ns(), None), failed=True)
        layers = None if output is None else output.layer_times
        return StepResult(StepTimes(begin_ns, end_ns, layers), sampled, puts)

    def _put_cached(self, work: Work) -> StepTimes | None:
        if not isinstance(work.task, Send):
            return None
        put = work.task.cached_put(work.chunk, self._runner.page_size)
        if put is None:
            return None
        begin_ns = self._now_ns()
        layers = self._runner.copy_slots(put.source, put.target, put.remote)
        return StepTimes(begin_ns, self._now_ns(), layers)

    def _results(
        self, batch: Sequence[Work], chunks: Sequence[RunnerChunk], logits: Logits
    ) -> list[SampledToken | MicroservingError]:
        """What becomes of the prompts and outputs. chunks: of the works that have tokens to compute."""
        works = [work for work in batch if work.chunk.length > 0]
        ends = list(itertools.accumulate(chunk.logits for chunk in chunks))
        if len(logits) != ends[-1]:
            raise InternalError(f"{len(logits)} rows of logits instead of {ends[-1]}")
        logits = logits[:, : self._vocab_size]
        sampling: list[tuple[Generation, int]] = []  # with the row behind its last one
        for work, chunk, end in zip(works, chunks, ends, strict=True):
            if isinstance(work.task, Generation):
                work.task.score_prompt(logits[end - chunk.logits : end], work.chunk)
                if work.samples:
                    sampling.append((work.task, end))
        return self._sample(sampling, logits)

    def _sample(
        self, sampling: Sequence[tuple[Generation, int]], logits: Logits
    ) -> list[SampledToken | MicroservingError]:
        rows = [end - 1 for task, end in sampling if task.output.room]
        drawn = logits if len(rows) == len(logits) else logits[rows]
        asked = [task.sampling_row() for task, _ in sampling if task.output.room]
        tokens = iter(sample(drawn, asked, self._vocab_size)) if asked else iter(())
        return [
            task.take(next(tokens), logits[end - 1]) if task.output.room else task.end_of_prompt()
            for task, end in sampling
        ]
