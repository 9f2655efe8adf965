"""Serves every request by attempts of the router program: as many as it takes, within bounds, without a seam.

The front's ``Backend``. Owns the attempts and their clean-ups, the requests' deadlines and the ledger; does not know
HTTP, nor which program is in charge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from microserving.errors import InternalError, MicroservingError, NoEngine, Overloaded, ShuttingDown
from microserving.front import ServedModel
from microserving.front.access import current_client
from microserving.grammar import GrammarCompiler
from microserving.program import Cluster, EngineClient
from microserving.protocol.generation import GenerationChunk, GenerationRequest
from microserving.router.admission import Admission
from microserving.router.alarms import Alarms
from microserving.router.attempt import Attempt
from microserving.router.hedging import race
from microserving.router.in_flight import InFlight
from microserving.router.journey import Journey
from microserving.router.ledger import AttemptRecord, Ledger
from microserving.router.program_host import ProgramHost
from microserving.router.retries import RetryBudget, RetrySettings, backoff_s, is_engines_fault
from microserving.router.watchdog import deadline_exceeded
from microserving.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)


class Served(Protocol):
    """What the engines serve, as far as the router knows (``health.HealthMonitor``)."""

    @property
    def model(self) -> ServedModel | None: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def grammars(self) -> GrammarCompiler | None: ...

    @property
    def ready(self) -> bool: ...

    async def refresh(self) -> None:
        """Look for engines now. Returns soon; bounded however often it is called."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Seconds. release_timeout_s: how long one engine may take to free things. request_timeout_s: the deadline of a
    request whose client gave none; None = none. stall_timeout_s: how long a program may neither ask an engine nor give a
    chunk. hedge_after_s: after so long without a first chunk another engine is tried beside the first; None = never.
    """

    release_timeout_s: float = 5.0
    request_timeout_s: float | None = None
    stall_timeout_s: float = 60.0
    hedge_after_s: float | None = None
    retries: RetrySettings = field(default_factory=RetrySettings)


class Dispatcher:
    """in_flight: shared with the engine clients. ledger: of all requests. on_failure: called with engines that failed a
    request, unless they are only full. admission: whether requests may begin (None: they may)."""

    def __init__(
        self,
        host: ProgramHost,
        cluster: Cluster,
        in_flight: InFlight,
        served: Served,
        settings: DispatchSettings | None = None,
        ledger: Ledger | None = None,
        on_failure: Callable[[EngineClient], None] | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.ledger = ledger or Ledger()
        self._host = host
        self._cluster = cluster
        self._in_flight = in_flight
        self._served = served
        self._settings = settings or DispatchSettings()
        self._budget = RetryBudget(self._settings.retries)
        self._on_failure = on_failure
        self._admission = admission
        self._releases: set[asyncio.Task[None]] = set()
        self._alarms = Alarms()
        self._accepting = True
        self._running = 0

    @property
    def running(self) -> int:
        """Attempts under way now."""
        return self._running

    @property
    def model(self) -> ServedModel | None:
        return self._served.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._served.tokenizer

    @property
    def grammars(self) -> GrammarCompiler | None:
        return self._served.grammars

    @property
    def ready(self) -> bool:
        return self._is_open and self._served.ready

    @property
    def _is_open(self) -> bool:
        return self._accepting and (self._admission is None or not self._admission.closed)

    async def refresh(self) -> None:
        if self._is_open:
            await self._served.refresh()

    def refuse_requests(self) -> None:
        """Take no more requests; those that run go on, but are not tried again."""
        self._accepting = False

    async def stop(self) -> None:
        """Wait for all clean-ups (each is bounded). Call when no request runs. Idempotent."""
        while self._releases:
            await asyncio.wait(self._releases)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """See ``Backend.generate``. An attempt that fails is followed by another one as ``_recover`` says.

        Raises also Overloaded, and ContextLengthExceeded for what is never admitted.
        """
        admission = self._admission
        if admission is not None:
            admission.check(request)
            if not admission.try_enter():
                request = await self._queue(request, admission)
        if not self._accepting:
            if admission is not None:
                admission.leave()
            raise ShuttingDown
        self._budget.deposit()
        journey = self._set_out(request)
        delivery, metrics = journey.delivery, self._cluster.metrics
        error: BaseException | None = None
        try:
            while not delivery.finished:
                attempts = [self._begin(journey)]
                failure: MicroservingError | None = None
                try:
                    chunk = await self._first(journey, attempts)
                    attempt = attempts[0]
                    while chunk is not None:
                        shown = delivery.take(chunk)
                        if delivery.count >= journey.next_look or delivery.finished:
                            journey.measure(attempt.record, metrics)
                        yield shown
                        if delivery.cut:
                            break
                        chunk = await attempt.next()
                except MicroservingError as failed:
                    failure = failed
                finally:
                    self._finish(attempts, failure)
                if failure is not None:
                    await self._recover(journey, attempts, failure)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._arrived(journey, error)
            if admission is not None:
                admission.leave()

    async def _queue(self, request: GenerationRequest, admission: Admission) -> GenerationRequest:
        """Wait for admission; the request's time runs meanwhile. Returns it with the time that is left."""
        timeout_s = self._settings.request_timeout_s if request.timeout_s is None else request.timeout_s
        if timeout_s is None:
            await admission.enter(current_client.get())
            return request
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await admission.enter(current_client.get())
        except TimeoutError:
            raise deadline_exceeded() from None
        return replace(request, timeout_s=max(0.0, deadline - loop.time()))

    def _set_out(self, request: GenerationRequest) -> Journey:
        record = self.ledger.open(request.request_id, len(request.prompt_token_ids))
        return Journey(request, record, self._settings.request_timeout_s)

    def _arrived(self, journey: Journey, error: BaseException | None) -> None:
        journey.record.output_tokens = journey.delivery.tokens
        self.ledger.close(journey.record, error, finished=journey.delivery.finished)

    def _begin(self, journey: Journey, beside: Attempt | None = None) -> Attempt:
        failed = journey.failed_program
        program = self._host.acquire() if failed is None else self._host.acquire(failed=failed)
        request = journey.next_request()
        record = AttemptRecord(program.name)
        journey.record.attempts.append(record)
        self._running += 1
        return Attempt(
            program,
            request,
            self._cluster,
            self._in_flight,
            record=record,
            without=journey.excluded if beside is None else journey.excluded | beside.engines,
            strictly=beside is not None or journey.spares_the_full,
            deadline=journey.deadline,
            stall_s=self._settings.stall_timeout_s,
            alarms=self._alarms,
        )

    async def _first(self, journey: Journey, attempts: list[Attempt]) -> GenerationChunk | None:
        """The first chunk of the attempt that has been begun, or of one that is begun beside it; the one that gives it is
        ``attempts[0]`` afterwards."""
        after_s = self._settings.hedge_after_s
        if after_s is None or journey.whole or journey.delivery.begun:
            return await attempts[0].next()

        def start_second() -> Attempt | None:
            if not self._budget.withdraw():
                return None
            journey.record.hedges += 1
            attempts.append(self._begin(journey, beside=attempts[0]))
            return attempts[1]

        winner, read = await race(attempts[0], start_second, after_s)
        attempts.sort(key=lambda attempt: attempt is not winner)
        return read.result()

    async def _recover(self, journey: Journey, attempts: list[Attempt], failure: MicroservingError) -> None:
        """Returns when the request may be tried again, after a pause. Raises ``failure`` when that must not be, and
        DeadlineExceeded. ``attempts[0]`` ended with ``failure``."""
        attempt = attempts[0]
        journey.failed(attempts, failure)
        self._report_engines(attempts)
        if not self._may_retry(journey, attempt, failure):
            if journey.overload is not None and isinstance(failure, NoEngine):
                failure = journey.overload
            attempt.report(failure)
            raise failure
        left_s = journey.remaining_s
        if isinstance(failure, NoEngine):
            journey.looked = True
            try:
                async with asyncio.timeout(left_s):
                    await self._served.refresh()
            except TimeoutError:
                raise deadline_exceeded() from None
        else:
            pause_s = backoff_s(self._settings.retries, journey.failures)
            await asyncio.sleep(pause_s if left_s is None else min(pause_s, left_s))
        _logger.info("request %s is tried again: %s", journey.record.request_id, failure.message)

    def _report_engines(self, attempts: list[Attempt]) -> None:
        if self._on_failure is None:
            return
        for attempt in attempts:
            if attempt.error is not None and not isinstance(attempt.error, Overloaded):
                for engine in attempt.failed:
                    self._on_failure(engine)

    def _may_retry(self, journey: Journey, attempt: Attempt, failure: MicroservingError) -> bool:
        settings, delivery, record = self._settings.retries, journey.delivery, journey.record
        if not self._accepting or delivery.finished or (delivery.begun and not delivery.resumable):
            return False
        if isinstance(failure, NoEngine):
            if journey.looked or journey.spares_the_full:
                return False
        elif isinstance(failure, InternalError):
            if attempt.outcome != "program_failed" or not self._host.has_other_than(attempt.program):
                return False
        elif not is_engines_fault(failure):
            return False
        if journey.failures >= settings.max_attempts or record.resumes >= settings.max_resumes:
            return False
        if delivery.begun:
            self._budget.charge()
            record.resumes += 1
            return True
        # A new program that is broken fails all that it gets until it is rolled back: no engine is the worse for it.
        if not isinstance(failure, InternalError) and not self._budget.withdraw():
            return False
        record.retries += 1
        return True

    def _finish(self, attempts: list[Attempt], failure: MicroservingError | None) -> None:
        """Leave nothing behind. In the background: whoever ended the request does not wait for it."""
        for attempt in attempts:
            self._running -= 1
            if failure is not None:
                attempt.record.error = (attempt.error or failure).code or "internal_error"
            if attempt.end():
                self._host.release(attempt.program, attempt.outcome)
                continue
            task = asyncio.create_task(self._release(attempt))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, attempt: Attempt) -> None:
        try:
            await attempt.release(self._settings.release_timeout_s)
        finally:
            self._host.release(attempt.program, attempt.outcome)
