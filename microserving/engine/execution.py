"""One step, executed: page copies, puts of cached K/V, the model, sampling.

Owns: the order of these, and the wall around them. Does not know: the books, the lock, who is told what. It runs on the
engine's thread; the pages of a step stay as they are until the step is complete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from microserving.engine.jobs import StepTimes
from microserving.engine.runner import ModelRunner, StepOutput
from microserving.engine.sampler import sample
from microserving.engine.tasks import Generation, SampledToken, Send, Task, Work
from microserving.errors import InternalError
from microserving.scheduler import PageCopy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """sampled: one for each work that samples, in order. puts: of cached K/V, by work. times: the model's run.

    failed: the step raised, nothing of it counts.
    """

    times: StepTimes
    sampled: Sequence[SampledToken | InternalError] = ()
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
            sampled = self._sample([work.task for work in batch if work.samples], output)
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

    def _sample(self, tasks: Sequence[Task], output: StepOutput | None) -> list[SampledToken | InternalError]:
        generations = [task for task in tasks if isinstance(task, Generation)]
        rows = 0 if output is None else len(output.logits)
        if len(generations) != rows:
            raise InternalError(f"{rows} rows of logits for {len(generations)} sequences")
        if output is None or not generations:
            return []
        tokens = sample(output.logits, [task.sampling_row() for task in generations], self._vocab_size)
        return [task.take(token) for task, token in zip(generations, tokens, strict=True)]
