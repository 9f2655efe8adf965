"""The engine: requests in, model steps, chunks out.

Owns: the live requests and the order of a step (schedule, execute, complete). Thread-safe: one lock, held for
microseconds and never while the model runs, so who brings a request waits for no step. Does not know: asyncio, HTTP,
descriptors, how KV travels.

Callbacks are called without the lock: on the thread that steps, or on the one whose call ended the request. A request
gets exactly one ending: a chunk with a ``finish_reason`` (or a ``SendDone``), or an error. Callbacks must not block;
one that raises is logged, and costs nobody else an ending.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from microserving.engine.books import Books, Event
from microserving.engine.config import EngineConfig
from microserving.engine.constraint import Constraint, unusable_grammar
from microserving.engine.execution import Executor
from microserving.engine.jobs import LoadSnapshot, Reservation, SendDone, SendJob
from microserving.engine.logprobs import ROWS_AT_ONCE, PromptScores
from microserving.engine.output import EngineTokenizer, OutputProcessor, stop_ids
from microserving.engine.pacing import Pacer
from microserving.engine.runner import ModelRunner
from microserving.engine.statistics import Timings
from microserving.engine.tasks import Generation, OnChunk, OnSent, Send
from microserving.engine.validation import check_generation, check_prompt, check_send
from microserving.errors import InternalError, KVExhausted, MicroservingError
from microserving.grammar import CompiledGrammar, GrammarCompiler, GrammarError
from microserving.protocol.generation import GenerationRequest
from microserving.protocol.microserving import resolve_index
from microserving.scheduler import LeasedPages, Scheduler, SequenceKind
from microserving.scheduler import Sequence as TokenSequence
from microserving.transports.base import Lease

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
        step_clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self.grammars = GrammarCompiler(tokenizer)
        self._clock = clock
        self._vocab_size = min(runner.vocab_size, tokenizer.vocab_size)
        self._lease_ttl_s = config.lease_ttl_s
        pool_tokens = runner.total_pages * runner.page_size
        self._max_context = min(config.max_context or runner.max_context, runner.max_context, pool_tokens)
        self._executor = Executor(runner, self._vocab_size, step_clock_ns)
        self._scheduler = Scheduler(config.scheduler_config(runner.total_pages, runner.page_size))
        self._books = Books(self._scheduler, Pacer(config.max_itl_ratio), runner.kv_bytes_per_token, clock)
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
        """When (by the engine's clock) ``step`` has something to end: a lease, a request whose time is over, or a send
        that waited in vain."""
        with self._lock:
            return self._scheduler.next_deadline

    # --- requests --------------------------------------------------------------------------------------------

    def submit(
        self,
        request: GenerationRequest,
        *,
        begin: int | None = None,
        on_chunk: OnChunk,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Queue a generation, or continue the reservation of the same request id.

        begin: from where on the caller wants the prompt computed here; what is in the cache beyond it is used. A resumed
        output that had ended already is told its end at once. grammar: the request's, for a caller who must not wait for
        it to be compiled here.
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
            constraint=self._constraint(request, grammar),
        )
        ended = output.resume(request.resume_output_ids)
        with self._changing() as events:
            self._require_open()
            self._books.expire_leases()
            if ended is None:
                task = self._generation(request, output, on_chunk)
                self._books.add_generation(request, wanted, task)
            else:
                self._books.count_ended(request, ended.finish_reason or "stop")
                events.append(partial(on_chunk, ended))
        self.on_change()

    def submit_send(self, job: SendJob, on_done: OnSent) -> None:
        """Queue a send; the receiver has granted the write.

        ``on_done`` is called when no put of it can happen any more, whether it was done, failed or was aborted; with
        KVExhausted when leases hold the pages that it needs, for longer than ``reserve_wait_s``. Raises as ``submit``.
        """
        check_send(job, vocab_size=self._vocab_size, max_context=self._max_context)
        prompt = list(job.prompt_token_ids[: job.end])
        destination = (job.destination, id(job.pool))  # the runner takes one pool object per step
        sequence = TokenSequence(
            job.request_id, SequenceKind.SEND, prompt, self._clock(), destination, job.cache_salt
        )
        with self._changing() as events:
            self._require_open()
            if job.begin < job.end:
                self._books.add_send(Send(sequence, job, on_done))
            else:
                events.append(partial(on_done, SendDone(0, 0, 0, 0)))
        self.on_change()

    def abort(self, request_id: str) -> bool:
        """End whatever lives under this id (reservation, generation, send). False when there is nothing.

        Pages are free at once, or after the running step when the request is in it.
        """
        with self._changing() as events:
            found = self._scheduler.abort_reservation(request_id)
            self._books.statistics.aborts += found
            events += self._books.abort_sequence(SequenceKind.GENERATE, request_id)
            events += self._books.abort_sequence(SequenceKind.SEND, request_id)
            found = found or bool(events)
        if found:
            self.on_change()
        return found

    def abort_send(self, request_id: str) -> bool:
        """End only the send of this id."""
        with self._changing() as events:
            events += self._books.abort_sequence(SequenceKind.SEND, request_id)
            found = bool(events)
        if found:
            self.on_change()
        return found

    def close(self, error: MicroservingError) -> None:
        """End every request and reservation with ``error``, refuse later ones. Not during a step. Idempotent.

        Every request is told, even when the books are broken.
        """
        with self._changing() as events:
            self._closed = self._closed or error
            events += self._books.end_all(error)
            self._scheduler.abort_all_reservations()

    def match_prefix(self, prompt_token_ids: Sequence[int], cache_salt: str = "") -> int:
        """How many tokens of the prompt are cached. Reads only."""
        check_prompt(prompt_token_ids, vocab_size=self._vocab_size, max_context=self._max_context)
        with self._lock:
            return self._scheduler.match_prefix(cache_salt, prompt_token_ids)

    # --- reservations ----------------------------------------------------------------------------------------

    def prep_recv(
        self, request_id: str, prompt_token_ids: Sequence[int], end: int, cache_salt: str = ""
    ) -> Reservation:
        """Reserve pages for the K/V of ``prompt[:end]``; a negative ``end`` counts from the end.

        Raises KVExhausted when the pages are not free now (AsyncEngine waits), InvalidRequest, ContextLengthExceeded,
        RequestConflict, Overloaded, EngineUnavailable.
        """
        prompt = tuple(prompt_token_ids)
        check_prompt(prompt, vocab_size=self._vocab_size, max_context=self._max_context)
        end = resolve_index(end, len(prompt), param="end")
        with self._changing():
            self._require_open()
            self._books.expire_leases()
            lease = self._scheduler.try_reserve(request_id, prompt, end, self._clock(), cache_salt)
            if lease is not None:
                # Under the lock: once it is free the lease may end, and the copy's target be another's page.
                self._copy_for(lease)
        if lease is None:
            raise KVExhausted(f"no free KV pages for {end} tokens now", retry_after_s=1.0)
        self.on_change()
        return self._reservation(lease)

    def commit(self, request_id: str) -> int:
        """Put what a reservation received into the prefix cache, and end it. Returns how many tokens are cached.

        Raises LeaseError when there is no live reservation, or not all of its K/V has arrived.
        """
        with self._changing():
            self._require_open()
            self._books.expire_leases()
            self._scheduler.require_not_ended(request_id)
            cached = self._scheduler.commit(request_id, self._clock())
        self.on_change()
        return cached

    def renew(self, request_id: str) -> float:
        """Seconds until the lease now expires. Raises LeaseError when there is no live one."""
        with self._changing():
            self._books.expire_leases()
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
                self._books.statistics.tokens_received += arrived.end - arrived.begin
        self.on_change()
        return arrived is not None

    # --- steps -----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Schedule, execute, complete. False = nothing could run."""
        with self._changing() as events:
            batch, copies = self._books.schedule(events)
            if not batch:
                events += self._books.give_up()
            moved = bool(batch or events)
        if batch:
            result = self._executor.execute(batch, copies)
            with self._changing() as events:
                self._books.complete(batch, result, events)
        return moved

    def load(self) -> LoadSnapshot:
        """As it is at this moment, also in the middle of a step."""
        with self._changing():
            self._books.expire_leases()
            return self._books.statistics.snapshot(self._scheduler)

    def timings(self) -> Timings:
        """How long steps, first tokens and gaps between tokens took so far."""
        with self._lock:
            return self._books.statistics.timings()

    def check(self) -> None:
        """Raises InternalError when the books do not balance. For tests and idle time."""
        with self._lock:
            self._scheduler.check()

    # --- helpers; those that touch state are called under the lock ---------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[list[Event]]:
        """Under the lock. What the body appends is told when the lock is free again, also when the body raises; and
        so are the writers whose leases ended in it."""
        events: list[Event] = []
        try:
            with self._lock:
                try:
                    yield events
                finally:
                    events += [partial(self.on_revoked, lease) for lease in self._scheduler.take_revoked()]
        finally:
            self._emit(events)

    def _generation(
        self, request: GenerationRequest, output: OutputProcessor, on_chunk: OnChunk
    ) -> Generation:
        count = None if request.resume_output_ids else request.prompt_logprobs  # else they were told already
        return Generation(
            self._sequence(request, scored=count is not None),
            request.sampling,
            output,
            on_chunk,
            gives_back=request.preemption == "return",
            logprobs=request.logprobs,
            scores=None if count is None else PromptScores(request.prompt_token_ids, count),
        )

    def _sequence(self, request: GenerationRequest, *, scored: bool) -> TokenSequence:
        """scored: all of the prompt's logits are wanted, so that all of it is computed, some at a time."""
        now = self._clock()
        return TokenSequence(
            request.request_id,
            SequenceKind.GENERATE,
            [*request.prompt_token_ids, *request.resume_output_ids],
            now,
            salt=request.cache_salt,
            deadline=None if request.timeout_s is None else now + request.timeout_s,
            prompt_length=len(request.prompt_token_ids),
            shares_prefix=not scored,
            chunk_limit=ROWS_AT_ONCE if scored else None,
        )

    def _constraint(self, request: GenerationRequest, grammar: CompiledGrammar | None) -> Constraint | None:
        """Raises InvalidRequest."""
        if request.grammar is None:
            return None
        compiled = grammar or self.grammars.compile(request.grammar)
        ends = stop_ids(request.stop, self._tokenizer.eos_token_ids)
        try:
            return Constraint(compiled.matcher(), ends, self._vocab_size, compiled.not_first)
        except GrammarError:
            raise unusable_grammar() from None

    def _copy_for(self, lease: LeasedPages) -> None:
        """Raises InternalError; then the lease has ended."""
        try:
            self._executor.copy(lease.copies)
        except Exception:
            logger.exception("the pages of reservation %s could not be copied", lease.request_id)
            self._scheduler.abort_reservation(lease.request_id, "failed")
            raise InternalError("cached pages could not be copied") from None

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
