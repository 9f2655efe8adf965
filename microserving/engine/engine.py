"""The engine: requests in, model steps, chunks out.

Owns: the live requests and the order of a step (schedule, run, complete). Thread-safe: one lock, held for microseconds
and never while the model runs. Does not know: asyncio, HTTP, descriptors, how KV travels.

Callbacks are called without the lock: on the thread that steps, or on the one that aborted the request. A request gets
exactly one ending: a chunk with a ``finish_reason`` (or a ``SendDone``), or an error. Callbacks must not block; one
that raises is logged, and costs nobody else an ending.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from microserving.engine.config import EngineConfig
from microserving.engine.jobs import LoadSnapshot, Reservation, SendDone, SendJob, StepTimes
from microserving.engine.output import EngineTokenizer, OutputProcessor
from microserving.engine.runner import ModelRunner, StepOutput
from microserving.engine.sampler import sample
from microserving.engine.statistics import Statistics
from microserving.engine.tasks import (
    Generation,
    OnChunk,
    OnSent,
    SampledToken,
    Send,
    StepResult,
    Task,
    Work,
    is_over,
)
from microserving.engine.validation import check_generation, check_prompt, check_send
from microserving.errors import (
    InternalError,
    InvalidRequest,
    KVExhausted,
    MicroservingError,
    RequestAborted,
)
from microserving.protocol.generation import GenerationRequest
from microserving.protocol.microserving import resolve_index
from microserving.scheduler import Chunk, LeasedPages, Scheduler, SchedulerConfig, SequenceKind
from microserving.scheduler import Sequence as TokenSequence
from microserving.transports.base import Lease

Event = Callable[[], None]

logger = logging.getLogger(__name__)


class Engine:
    """Thread-safe facade. Someone calls ``step`` again and again on one thread (``AsyncEngine``, or a test)."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: EngineTokenizer,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._clock = clock
        self._vocab_size = min(runner.vocab_size, tokenizer.vocab_size)
        self._lease_ttl_s = config.lease_ttl_s
        pool_tokens = runner.total_pages * runner.page_size
        self._max_context = min(config.max_context or runner.max_context, runner.max_context, pool_tokens)
        self._scheduler = Scheduler(
            SchedulerConfig(
                total_pages=runner.total_pages,
                page_size=runner.page_size,
                chunk_size_tokens=config.chunk_size_tokens,
                max_batch_size=config.max_batch_size,
                max_sequences=config.max_sequences,
                lease_ttl_s=config.lease_ttl_s,
                page_wait_s=config.reserve_wait_s,
            )
        )
        self._statistics = Statistics()
        self._tasks: dict[TokenSequence, Task] = {}
        self._lock = threading.Lock()
        self._closed: MicroservingError | None = None
        self.on_change: Event = _nothing
        """Called (without the lock, on any thread) when ``step`` may have something to do or pages may be free."""
        self.on_revoked: Callable[[int], None] = _nobody_writes
        """Called (likewise) with the id of a lease that ended under its writer, which need not go on."""

    @property
    def max_context(self) -> int:
        """Prompt plus output: the least of the model's, the config's and the pool's limit, in tokens."""
        return self._max_context

    @property
    def pages_freed(self) -> int:
        """Moves whenever pages became free."""
        return self._scheduler.pages_freed

    @property
    def next_deadline(self) -> float | None:
        """When (by the engine's clock) ``step`` has something to end: a lease, or a send that waited in vain."""
        with self._lock:
            return self._scheduler.next_deadline

    # --- requests --------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, *, begin: int | None = None, on_chunk: OnChunk) -> None:
        """Queue a generation, or continue the reservation of the same request id.

        begin: from where on the caller wants the prompt computed here; what is in the cache beyond it is used.
        Raises InvalidRequest, ContextLengthExceeded, RequestConflict, LeaseError, Overloaded, EngineUnavailable;
        then nothing was changed.
        """
        prompt = request.prompt_token_ids
        max_output = check_generation(request, vocab_size=self._vocab_size, max_context=self._max_context)
        wanted = 0 if begin is None else resolve_index(begin, len(prompt), param="begin")
        output = OutputProcessor(
            self._tokenizer.detokenizer(),
            request.stop,
            self._tokenizer.eos_token_ids,
            prompt_tokens=len(prompt),
            max_output=max_output,
        )
        sequence = TokenSequence(request.request_id, SequenceKind.GENERATE, list(prompt), self._clock())
        with self._lock:
            self._require_open()
            self._expire()
            self._add_generation(sequence, prompt, wanted)
            self._tasks[sequence] = Generation(sequence, request.sampling, output, on_chunk)
        self.on_change()

    def submit_send(self, job: SendJob, on_done: OnSent) -> None:
        """Queue a send; the receiver has granted the write.

        ``on_done`` is called when no put of it can happen any more, whether it was done, failed or was aborted; with
        KVExhausted when leases hold the pages that it needs, for longer than ``reserve_wait_s``. Raises as ``submit``.
        """
        check_send(job, vocab_size=self._vocab_size, max_context=self._max_context)
        if job.begin == job.end:
            on_done(SendDone(0, 0, 0))
            self.on_change()
            return
        prompt = list(job.prompt_token_ids[: job.end])
        destination = (job.destination, id(job.pool))  # the runner takes one pool object per step
        sequence = TokenSequence(job.request_id, SequenceKind.SEND, prompt, self._clock(), destination)
        with self._lock:
            self._require_open()
            self._scheduler.add(sequence)
            self._tasks[sequence] = Send(sequence, job, on_done)
        self.on_change()

    def abort(self, request_id: str) -> bool:
        """End whatever lives under this id (reservation, generation, send). False when there is nothing.

        Pages are free at once, or after the running step when the request is in it.
        """
        with self._lock:
            found = self._scheduler.abort_reservation(request_id)
            self._statistics.aborts += found
            events = self._abort_sequence(SequenceKind.GENERATE, request_id)
            events += self._abort_sequence(SequenceKind.SEND, request_id)
            revocations = self._revocations()
        self._emit(revocations)
        return self._after_abort(events, found or bool(events))

    def abort_send(self, request_id: str) -> bool:
        """End only the send of this id."""
        with self._lock:
            events = self._abort_sequence(SequenceKind.SEND, request_id)
        return self._after_abort(events, bool(events))

    def close(self, error: MicroservingError) -> None:
        """End every request and reservation with ``error``, refuse later ones. Not during a step. Idempotent."""
        with self._lock:
            self._closed = self._closed or error
            self._scheduler.abort_all_reservations()
            events = [self._end(task, error) for task in list(self._tasks.values())]
            events += self._revocations()
        self._emit(events)

    def match_prefix(self, prompt_token_ids: Sequence[int]) -> int:
        """How many tokens of the prompt are cached: none, until there is a prefix cache."""
        check_prompt(prompt_token_ids, vocab_size=self._vocab_size, max_context=self._max_context)
        return 0

    # --- reservations ----------------------------------------------------------------------------------------

    def prep_recv(self, request_id: str, prompt_token_ids: Sequence[int], end: int) -> Reservation:
        """Reserve pages for the K/V of ``prompt[:end]``; a negative ``end`` counts from the end.

        Raises KVExhausted when the pages are not free now (AsyncEngine waits), InvalidRequest, ContextLengthExceeded,
        RequestConflict, Overloaded, EngineUnavailable.
        """
        prompt = tuple(prompt_token_ids)
        check_prompt(prompt, vocab_size=self._vocab_size, max_context=self._max_context)
        end = resolve_index(end, len(prompt), param="end")
        with self._lock:
            self._require_open()
            self._expire()
            lease = self._scheduler.try_reserve(request_id, prompt, end, self._clock())
        if lease is None:
            raise KVExhausted(f"no free KV pages for {end} tokens now", retry_after_s=1.0)
        self.on_change()
        return self._reservation(lease)

    def renew(self, request_id: str) -> float:
        """Seconds until the lease now expires. Raises LeaseError when there is no live one."""
        with self._lock:
            self._expire()
            if self._scheduler.get(SequenceKind.GENERATE, request_id) is None:
                self._scheduler.renew(request_id, self._clock())
        return self._lease_ttl_s

    def begin_write(self, lease: Lease) -> bool:
        """The transport's ``LeaseObserver``: may this writer start?"""
        with self._lock:
            return self._scheduler.begin_write(lease.request_id, lease.lease_id, self._clock())

    def end_write(self, lease: Lease, ok: bool) -> bool:
        """The transport's ``LeaseObserver``: the writer stopped. False when the lease had ended meanwhile."""
        with self._lock:
            arrived = self._scheduler.end_write(lease.lease_id, ok, self._clock())
            if arrived is not None:
                self._statistics.tokens_received += arrived.end - arrived.begin
        self.on_change()
        return arrived is not None

    # --- steps -----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Schedule, run, complete. False = nothing could run."""
        batch = self._schedule()
        if not batch:
            self._emit(self._give_up())
            return False
        self._emit(self._complete(batch, self._run(batch)))
        return True

    def load(self) -> LoadSnapshot:
        with self._lock:
            return self._statistics.snapshot(self._scheduler)

    def check(self) -> None:
        """Raises InternalError when the books do not balance. For tests and idle time."""
        with self._lock:
            self._scheduler.check()

    def _schedule(self) -> list[Work]:
        with self._lock:
            self._expire()
            revocations = self._revocations()
            step = self._scheduler.schedule(self._clock())
            batch = [Work(chunk, self._tasks[chunk.sequence]) for chunk in step.chunks]
        self._emit(revocations)
        return batch

    def _give_up(self) -> list[Event]:
        with self._lock:
            sequence = self._scheduler.send_to_give_up(self._clock())
            if sequence is None:
                return []
            error = KVExhausted("reservations hold the KV pages that this send needs", retry_after_s=1.0)
            return [self._end(self._tasks[sequence], error)]

    def _run(self, batch: Sequence[Work]) -> StepResult:
        """Run the model and sample. The wall: what goes wrong in here ends this step's requests and nothing else."""
        begin_ns = time.monotonic_ns()
        try:
            output = self._runner.run([work.task.runner_chunk(work.chunk) for work in batch])
            end_ns = time.monotonic_ns()
            sampled = self._sample([work.task for work in batch if work.samples], output)
        except Exception:
            ids = [work.task.sequence.request_id for work in batch]
            logger.exception("a step failed; its requests end with an error: %s", ids)
            return StepResult(StepTimes(begin_ns, time.monotonic_ns(), None), failed=True)
        return StepResult(StepTimes(begin_ns, end_ns, output.layer_times), sampled)

    def _sample(self, tasks: Sequence[Task], output: StepOutput) -> list[SampledToken | InternalError]:
        generations = [task for task in tasks if isinstance(task, Generation)]
        if len(generations) != len(output.logits):
            raise InternalError(f"{len(output.logits)} rows of logits for {len(generations)} sequences")
        if not generations:
            return []
        tokens = sample(output.logits, [task.sampling_row() for task in generations], self._vocab_size)
        return [task.take(token) for task, token in zip(generations, tokens, strict=True)]

    def _complete(self, batch: Sequence[Work], result: StepResult) -> list[Event]:
        """Account for the step; returns what its requests are to be told."""
        events: list[Event] = []
        sampled = iter(result.sampled)
        with self._lock:
            if not result.failed:
                seconds = (result.times.end_ns - result.times.begin_ns) / 1e9
                self._statistics.count_step([work.chunk for work in batch], seconds)
            self._scheduler.complete(ok=not result.failed)
            for work in batch:
                if result.failed:
                    events += self._fail(work.task)
                elif isinstance(work.task, Send):
                    events += self._advance_send(work.task, work.chunk, result.times)
                elif work.samples:
                    events += self._advance_generation(work.task, next(sampled))
        return events

    def _fail(self, task: Task) -> list[Event]:
        if isinstance(task, Send) and task.error is not None:
            return [self._end(task, task.error)]
        return [] if is_over(task) else [self._end(task, InternalError("the model step failed"))]

    def _advance_generation(self, task: Generation, sampled: SampledToken | InternalError) -> list[Event]:
        if is_over(task):
            return []
        if isinstance(sampled, InternalError):
            return [self._end(task, sampled)]
        task.sequence.tokens.append(sampled.token_id)
        self._statistics.output_tokens += 1
        if sampled.chunk is None:
            return []
        if sampled.chunk.finish_reason is not None:
            self._forget(task, sampled.chunk.finish_reason)
        return [partial(task.notify, sampled.chunk)]

    def _advance_send(self, task: Send, chunk: Chunk, times: StepTimes) -> list[Event]:
        task.advance(chunk, times)
        sent = len(task.positions_to_send(chunk))
        self._statistics.tokens_sent += sent
        self._statistics.bytes_sent += sent * self._runner.kv_bytes_per_token
        if task.error is not None:
            return [self._end(task, task.error)]
        if not chunk.last:
            return []
        self._forget(task, "sent")
        return [partial(task.notify, task.done(self._runner.kv_bytes_per_token))]

    # --- helpers; those that touch state are called under the lock ---------------------------------------------

    def _add_generation(self, sequence: TokenSequence, prompt: tuple[int, ...], wanted: int) -> None:
        lease = self._scheduler.reservation(sequence.request_id)
        if lease is not None and lease.prompt != prompt:
            raise InvalidRequest("the prompt is not the one that was reserved for", param="prompt")
        if lease is None:
            self._scheduler.require_not_ended(sequence.request_id)
        cached = 0 if lease is None else lease.end
        if wanted > cached:
            raise InvalidRequest(
                f"begin {wanted} is above the {cached} tokens that are in the cache", param="begin"
            )
        if lease is None:
            self._scheduler.add(sequence)
        else:
            self._scheduler.add_received(sequence)

    def _abort_sequence(self, kind: SequenceKind, request_id: str) -> list[Event]:
        """Tells the request, except a send that is in the running step: that one is told when the step is over."""
        sequence = self._scheduler.get(kind, request_id)
        if sequence is None:
            return []
        self._statistics.aborts += 1
        task = self._tasks[sequence]
        error = RequestAborted(f"request {request_id!r} was aborted")
        if isinstance(task, Send) and self._scheduler.is_in_flight(sequence):
            task.error = error
            self._scheduler.finish(sequence)
            return [_nothing]
        return [self._end(task, error)]

    def _after_abort(self, events: list[Event], found: bool) -> bool:
        self._emit(events)
        if found:
            self.on_change()
        return found

    def _end(self, task: Task, error: MicroservingError) -> Event:
        self._forget(task, "abort" if isinstance(error, RequestAborted) else "error")
        return partial(task.notify, error)

    def _forget(self, task: Task, ending: str) -> None:
        del self._tasks[task.sequence]
        if not is_over(task):
            self._scheduler.finish(task.sequence)
        self._statistics.finished[ending] += 1

    def _expire(self) -> None:
        self._statistics.leases_expired += len(self._scheduler.expire(self._clock()))

    def _revocations(self) -> list[Event]:
        return [partial(self.on_revoked, lease_id) for lease_id in self._scheduler.take_revoked()]

    def _require_open(self) -> None:
        if self._closed is not None:
            raise type(self._closed)(self._closed.message)

    def _reservation(self, lease: LeasedPages) -> Reservation:
        positions = np.arange(lease.begin, lease.end)
        pages = np.asarray(lease.pages, np.int32)
        size = self._runner.page_size
        slots = pages[positions // size] * size + positions % size
        return Reservation(
            request_id=lease.request_id,
            lease_id=lease.lease_id,
            prompt_token_ids=lease.prompt,
            prefix_matched_length=lease.begin,
            end=lease.end,
            slots=slots.astype(np.int32),
            lease_ttl_s=self._lease_ttl_s,
        )

    @staticmethod
    def _emit(events: Sequence[Event]) -> None:
        for event in events:
            try:
                event()
            except Exception:  # a listener's fault; the other requests must still hear of their ending
                logger.exception("a listener failed")


def _nothing() -> None:
    """The listener when nobody listens."""


def _nobody_writes(_: int) -> None:
    """The listener of an engine that is not served to writers."""
