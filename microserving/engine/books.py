"""The live requests and what becomes of them: admitted, scheduled, advanced by a step, ended. All under the engine's lock.

Owns: the tasks, the scheduler, the statistics. Does not know: threads, the model, callbacks' listeners (it hands back
what they are to be told, in order; the engine tells them without the lock).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from microserving.engine.execution import StepResult
from microserving.engine.jobs import StepTimes
from microserving.engine.pacing import Pacer
from microserving.engine.statistics import Statistics, prefilled
from microserving.engine.tasks import Generation, SampledToken, Send, Task, Work, is_over
from microserving.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVExhausted,
    MicroservingError,
    RequestAborted,
    RequestConflict,
)
from microserving.protocol.generation import FinishReason, GenerationRequest
from microserving.scheduler import Chunk, PageCopy, Scheduler, SequenceKind, SequenceState
from microserving.scheduler import Sequence as TokenSequence

logger = logging.getLogger(__name__)

_LEAST_STEP_S = 1e-6
_MOST_BETWEEN_S = 0.1
"""What passes between two steps counts as the engine's pace up to here, or up to the step's own time: more is a stall."""

Event = Callable[[], None]


class Books:
    """Not thread-safe. Between ``schedule`` and ``complete`` requests may come and be aborted."""

    def __init__(
        self, scheduler: Scheduler, pacer: Pacer, kv_bytes_per_token: int, clock: Callable[[], float]
    ) -> None:
        self.scheduler = scheduler
        self.statistics = Statistics()
        self._pacer = pacer
        self._kv_bytes_per_token = kv_bytes_per_token
        self._clock = clock
        self._tasks: dict[TokenSequence, Task] = {}
        # When the step that runs began, or the one before it ended; None: nothing ran before it.
        self._since: float | None = None

    # --- requests --------------------------------------------------------------------------------------------

    def add_generation(self, request: GenerationRequest, wanted: int, task: Generation) -> None:
        """wanted: from where on the caller wants the prompt computed here. One whose prompt is scored computes all of it,
        whatever was received.

        Raises InvalidRequest, LeaseError, RequestConflict, Overloaded; then nothing was changed.
        """
        if task.scores is not None:
            self.scheduler.add_instead(task.sequence)
        else:
            self._check_against_lease(request, wanted)
            if self.scheduler.reservation(request.request_id) is None:
                self.scheduler.add(task.sequence)
            else:
                self.scheduler.add_received(task.sequence)
        self._tasks[task.sequence] = task

    def count_ended(self, request: GenerationRequest, reason: FinishReason) -> None:
        """A resumed request that has nothing left to do, and no use for its reservation. Raises RequestConflict."""
        if self.scheduler.get(SequenceKind.GENERATE, request.request_id) is not None:
            raise RequestConflict(f"request {request.request_id!r} is live", param="request_id")
        self.scheduler.abort_reservation(request.request_id)
        self.statistics.finished[reason] += 1

    def add_send(self, task: Send) -> None:
        """Raises RequestConflict, Overloaded."""
        self.scheduler.add(task.sequence)
        self._tasks[task.sequence] = task

    def abort_sequence(self, kind: SequenceKind, request_id: str) -> list[Event]:
        """Tells the request, except a send that is in the running step: that one is told when the step is over."""
        sequence = self.scheduler.get(kind, request_id)
        if sequence is None:
            return []
        self.statistics.aborts += 1
        task = self._tasks[sequence]
        error = RequestAborted(f"request {request_id!r} was aborted")
        if isinstance(task, Send) and self.scheduler.is_in_flight(sequence):
            task.error = error
            self.scheduler.finish(sequence)
            return [_nothing]
        return [self.end(task, error)]

    def end_all(self, error: MicroservingError) -> list[Event]:
        """End every request. The wall: one that the scheduler cannot end any more is told all the same."""
        events: list[Event] = []
        for task in list(self._tasks.values()):
            try:
                events.append(self.end(task, error))
            except Exception:
                logger.exception("request %s was not ended well", task.sequence.request_id)
                events.append(partial(task.notify, error))
        self._tasks.clear()
        return events

    def expire_leases(self) -> None:
        self.statistics.leases_expired += len(self.scheduler.expire(self._clock()))

    # --- steps -----------------------------------------------------------------------------------------------

    def schedule(self, events: list[Event]) -> tuple[list[Work], list[PageCopy]]:
        """The next step (empty: nothing can run). events: gets what requests are to be told before it."""
        self.expire_leases()
        self._expire_requests(events)
        step = self.scheduler.schedule(self._clock(), self._prefill_budget())
        self._give_back(events)
        if not step.chunks:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        return [Work(chunk, self._tasks[chunk.sequence]) for chunk in step.chunks], step.copies

    def give_up(self) -> list[Event]:
        """End a send that has waited long enough for pages, when nothing could run."""
        sequence = self.scheduler.send_to_give_up(self._clock())
        if sequence is None:
            return []
        error = KVExhausted("reservations hold the KV pages that this send needs", retry_after_s=1.0)
        return [self.end(self._tasks[sequence], error)]

    def complete(self, batch: Sequence[Work], result: StepResult, events: list[Event]) -> None:
        """Account for the step. events: gets what its requests are to be told, one by one, so that whatever goes wrong
        here costs nobody an ending."""
        sampled = iter(result.sampled)
        if result.failed:
            self._since = None
        else:
            self._count_step([work.chunk for work in batch], result.times)
        self.scheduler.complete(ok=not result.failed, bad=_failed_samples(batch, result))
        for index, work in enumerate(batch):
            if result.failed:
                events += self._fail(work.task)
            elif isinstance(work.task, Send):
                times = result.send_times(index, ran=work.chunk.length > 0)
                events += self._advance_send(work.task, work.chunk, times)
            elif work.samples:
                events += self._advance_generation(work.task, next(sampled))

    # --- helpers ---------------------------------------------------------------------------------------------

    def _prefill_budget(self) -> int | None:
        """What a step with decodes may have beside them; None = it has none."""
        sequences = list(self.scheduler.sequences())
        decodes = sum(s.state is SequenceState.DECODE for s in sequences)
        if decodes == 0:
            return None
        position = max((s.computed for s in sequences if s.state is SequenceState.PREFILL), default=0)
        return self._pacer.budget(decodes, position, self.scheduler.config.chunk_size_tokens)

    def _give_back(self, events: list[Event]) -> None:
        """End what was preempted and is not to be computed again here."""
        lost = [t for t in self._tasks.values() if isinstance(t, Generation) and t.must_give_back]
        for task in lost:
            self._forget(task, "preempt")
            events.append(partial(task.notify, task.output.preempted()))

    def _expire_requests(self, events: list[Event]) -> None:
        """Between steps only: nothing of these runs."""
        for sequence in self.scheduler.expired_sequences(self._clock()):
            error = DeadlineExceeded("the request took longer than its timeout")
            events.append(self.end(self._tasks[sequence], error))

    def _count_step(self, chunks: Sequence[Chunk], times: StepTimes) -> None:
        seconds, now = max((times.end_ns - times.begin_ns) / 1e9, _LEAST_STEP_S), self._clock()
        between_s = 0.0 if self._since is None else now - self._since - seconds
        whole_s = seconds + min(max(between_s, 0.0), max(seconds, _MOST_BETWEEN_S))
        self._since = now
        self.statistics.count_step(chunks, seconds, whole_s)
        tokens, position = prefilled(chunks)
        self._pacer.observe(sum(chunk.decode for chunk in chunks), tokens, position, seconds)

    def _fail(self, task: Task) -> list[Event]:
        if isinstance(task, Send) and task.error is not None:
            return [self.end(task, task.error)]
        if is_over(task):
            return []
        return [self.end(task, InternalError("the model step failed"), publish=False)]

    def _advance_generation(self, task: Generation, sampled: SampledToken | MicroservingError) -> list[Event]:
        if is_over(task):
            return []
        if isinstance(sampled, MicroservingError):
            return [self.end(task, sampled, publish=False)]
        if sampled.token_id is not None:
            task.sequence.tokens.append(sampled.token_id)
            self._count_token(task)
        if sampled.chunk is None:
            return []
        if sampled.chunk.finish_reason is not None:
            self._forget(task, sampled.chunk.finish_reason)
        return [partial(task.notify, sampled.chunk)]

    def _count_token(self, task: Generation) -> None:
        sequence, now = task.sequence, self._clock()
        first = len(sequence.tokens) == sequence.prompt_length + 1
        self.statistics.count_token(now, task.last_token_at, sequence.arrival if first else None)
        task.last_token_at = now

    def _advance_send(self, task: Send, chunk: Chunk, times: list[StepTimes]) -> list[Event]:
        sent = task.advance(chunk, times)
        self.statistics.tokens_sent += sent
        self.statistics.bytes_sent += sent * self._kv_bytes_per_token
        if task.error is not None:
            return [self.end(task, task.error)]
        if not chunk.last:
            return []
        if not task.complete:
            return [self.end(task, InternalError("not every position was sent"))]
        self._forget(task, "sent")
        return [partial(task.notify, task.done(self._kv_bytes_per_token))]

    def _check_against_lease(self, request: GenerationRequest, wanted: int) -> None:
        """Raises InvalidRequest when the request is not the one that was reserved for, or the prompt below ``wanted`` is
        not there; LeaseError when its reservation has ended."""
        prompt, salt = request.prompt_token_ids, request.cache_salt
        lease = self.scheduler.reservation(request.request_id)
        if lease is None:
            self.scheduler.require_not_ended(request.request_id)
        elif lease.prompt != prompt:
            raise InvalidRequest("the prompt is not the one that was reserved for", param="prompt")
        elif lease.salt != salt:
            raise InvalidRequest("the cache_salt is not the one that was reserved with", param="cache_salt")
        cached = 0 if lease is None else lease.end
        if wanted > cached:
            cached = max(cached, self.scheduler.match_prefix(salt, prompt))
        if wanted > cached:
            raise InvalidRequest(
                f"begin {wanted} is above the {cached} tokens that are in the cache", param="begin"
            )

    def end(self, task: Task, error: MicroservingError, *, publish: bool = True) -> Event:
        ending = {RequestAborted: "abort", DeadlineExceeded: "deadline"}.get(type(error), "error")
        self._forget(task, ending, publish=publish)
        return partial(task.notify, error)

    def _forget(self, task: Task, ending: str, *, publish: bool = True) -> None:
        if not is_over(task):
            self.scheduler.finish(task.sequence, publish=publish)
        del self._tasks[task.sequence]
        self.statistics.finished[ending] += 1


def _failed_samples(batch: Sequence[Work], result: StepResult) -> list[TokenSequence]:
    """Whose sampling failed: what they computed may be wrong."""
    sampling = [work.task.sequence for work in batch if work.samples]
    pairs = zip(sampling, result.sampled, strict=not result.failed)
    return [sequence for sequence, token in pairs if isinstance(token, MicroservingError)]


def _nothing() -> None:
    """What a request is told that will be told later."""
