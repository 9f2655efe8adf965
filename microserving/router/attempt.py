"""One run of the program for one request, held to the rules.

Owns the run from its first step to its clean-up. Does not know where engines come from or whether there is another
attempt after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from http import HTTPStatus

from microserving.errors import (
    DeadlineExceeded,
    InternalError,
    LeaseError,
    MicroservingError,
    NoEngine,
    Preempted,
    RequestError,
    ShuttingDown,
    StartupError,
    TransferFailed,
    http_status,
)
from microserving.program import Cluster, EngineClient, GenerationChunk, Request
from microserving.router.alarms import Alarms
from microserving.router.endings import close_within
from microserving.router.holdings import Holdings
from microserving.router.in_flight import InFlight
from microserving.router.ledger import AttemptRecord
from microserving.router.program_host import Outcome
from microserving.router.program_loader import LoadedProgram
from microserving.router.watchdog import WAITING, ProgramHungError, Watchdog

_logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""How long the program's own clean-up may take."""
_OURS = (asyncio.CancelledError, ProgramHungError)
"""What the program did not raise but was stopped with."""
_CHOSEN_BY_PROGRAM = frozenset({"begin", "end", "kv_addr_info", "recv_rank", "request_id"})
"""Fields of the verbs that no client sends: an engine that refuses one refuses what the program did."""


class Attempt:
    """Ask for the ``next`` chunk until there is none; then, however that ended, ``end`` it, and ``release`` what that left
    over.

    outcome: how it ended for the program, once it did. error: with which it failed, if it did. deadline: loop time. stall_s: how long the program may do
    nothing, neither ask an engine nor give a chunk. without, strictly: see ``Cluster.bound``. alarms: shared.
    """

    def __init__(
        self,
        program: LoadedProgram,
        request: Request,
        cluster: Cluster,
        in_flight: InFlight,
        *,
        record: AttemptRecord,
        without: Collection[EngineClient] = (),
        strictly: bool = False,
        deadline: float | None = None,
        stall_s: float = 60.0,
        alarms: Alarms | None = None,
    ) -> None:
        self.program = program
        self.outcome: Outcome = "other"
        self.error: MicroservingError | None = None
        self.record = record
        self._request = request
        self._holdings = Holdings(in_flight, record, cluster.index, alarms)
        self._cluster = cluster.bound(
            seen=self._holdings.bind, chosen=self._holdings.choose, without=without, strictly=strictly
        )
        self._watchdog = Watchdog(
            self._holdings, deadline=deadline, stall_s=stall_s, alarms=alarms, clinging=self._take_away
        )
        self._route: AsyncIterator[GenerationChunk] | None = None
        self._running = self._finished = False
        self._told_of_await = False
        self._reading: asyncio.Task[GenerationChunk | None] | None = None
        self._taking_away: asyncio.Task[None] | None = None

    @property
    def failed(self) -> set[EngineClient]:
        """The engines that failed it; of a transfer both ends."""
        return self._holdings.failed

    @property
    def engines(self) -> set[EngineClient]:
        """The engines that it uses now."""
        return self._holdings.engines

    def end(self) -> bool:
        """No more chunks are wanted. False: there is something to ``release``."""
        self._holdings.unclaim()
        tasks = any(task is not None and not task.done() for task in (self._reading, self._taking_away))
        if tasks or self._running or self._holdings:
            return False
        self._holdings.close()
        return True

    def read_ahead(self) -> asyncio.Task[GenerationChunk | None]:
        """Wait for the first chunk (None: there is none) in a task of its own, which ``release`` ends."""

        async def read() -> GenerationChunk | None:
            try:
                return await self.next()
            finally:
                self._watchdog.forget_task()

        self._reading = asyncio.create_task(read())
        return self._reading

    async def release(self, timeout_s: float) -> None:
        """Stop the program where it is and give back all that the attempt holds on engines."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading], timeout=timeout_s)
        await self._stop(timeout_s)
        if not self._told_of_await and (hint := self._not_awaited()):
            _logger.warning("the router program %s forgot something%s", self.program.where, hint)
        self._holdings.close_calls()
        if self._taking_away is not None:
            await asyncio.wait([self._taking_away])
        await self._holdings.release(timeout_s)

    async def next(self) -> GenerationChunk | None:
        """The program's next chunk; None after the last one. Raises: what the program let pass of ``errors``,
        InternalError for its bugs. Not after it has raised."""
        watchdog, exhausted = self._watchdog, False
        try:
            watchdog.check()
            route = self._start() if self._route is None else self._route
            watchdog.waiting = WAITING
            try:
                chunk = await route.__anext__()
            except StopAsyncIteration:
                exhausted = True
            finally:
                watchdog.waiting = 0
                if watchdog.cancelled:
                    watchdog.settle()
            if exhausted:
                self._ended()
                return None
            if self._finished:
                raise self._bug("went on after the last chunk")
            if type(chunk) is not GenerationChunk or chunk.finish_reason is not None:
                self._finished = self._is_last(chunk)
        except BaseException as error:  # the wall: a program may raise anything
            if isinstance(error, GeneratorExit) and not watchdog.stepping:
                raise  # nobody runs us any more
            if not exhausted:
                await self._stop(_CLOSE_S)
            told = self._told(error)
            self.error = told if isinstance(told, MicroservingError) else None
            if told is error:
                raise
            raise told from None if isinstance(error, _OURS) else error
        self._holdings.unclaim()  # who was chosen and not asked so far does not serve this request
        return chunk

    def _take_away(self) -> None:
        """The program goes on although it was stopped: the engines that it holds are freed all the same."""
        if self._taking_away is None:
            where = self.program.where
            _logger.error(
                "the router program %s does not end although it was cancelled: its engines are freed", where
            )
            self._taking_away = asyncio.create_task(self._holdings.release(_CLOSE_S))

    def _start(self) -> AsyncIterator[GenerationChunk]:
        self._running = True
        self._route = route = aiter(self.program.instance.route(self._request, self._cluster))
        return route

    def _ended(self) -> None:
        self._watchdog.close()
        self._running = False
        if not self._finished:
            raise self._bug("ended without a last chunk (one with a finish_reason)")
        self.outcome = "ok"

    async def _stop(self, timeout_s: float) -> None:
        """The program goes no further. Idempotent."""
        self._watchdog.close()
        try:
            if self._running and self._route is not None:
                await close_within(self._route, timeout_s)
        finally:
            self._running = False

    def _told(self, error: BaseException) -> BaseException:
        """What is raised for ``error``, with which a step of the program ended."""
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                return error
            return self._bug("was cancelled from within")
        if isinstance(error, ProgramHungError):
            return self._bug("hung: it neither asked an engine nor gave a chunk for too long")
        if isinstance(error, MicroservingError) and not isinstance(error, StartupError):
            return self._refused(error)
        return self._failed(error)

    def _is_last(self, chunk: object) -> bool:
        if not isinstance(chunk, GenerationChunk):
            raise self._bug(f"yielded a {type(chunk).__name__} instead of a GenerationChunk")
        if chunk.finish_reason == "preempt":
            raise Preempted("the generation was given back by its engine", retry_after_s=1.0)
        return chunk.finish_reason is not None

    def _failed(self, error: BaseException) -> InternalError:
        self.outcome = "program_failed"
        where = self.program.locate(error)
        _logger.error("the router program failed at %s: %r%s", where, error, self._not_awaited())
        return _logged("the router program failed; the server's log has the details")

    def _bug(self, what: str) -> InternalError:
        self.outcome = "program_failed"
        _logger.error("the router program %s %s%s", self.program.where, what, self._not_awaited())
        return _logged(f"the router program {what}")

    def report(self, error: MicroservingError) -> None:
        """Log, with the program's line, that the request ended with ``error``, unless that is told elsewhere."""
        if error.logged or isinstance(error, (NoEngine, ShuttingDown)):
            return
        where, hint = self.program.locate(error), self._not_awaited()
        _logger.log(_level(error), "a request failed at %s: %s%s", where, error.message, hint)
        error.logged = True

    def _refused(self, error: MicroservingError) -> MicroservingError:
        """What the client gets of an error that the program let pass."""
        if error.param not in _CHOSEN_BY_PROGRAM or isinstance(error, (LeaseError, TransferFailed)):
            return error
        self.outcome = "program_failed"
        where, hint = self.program.locate(error), self._not_awaited()
        _logger.error("the router program asked wrongly at %s: %s%s", where, error.message, hint)
        return _logged("the router program asked an engine wrongly; the server's log has the details")

    def _not_awaited(self) -> str:
        """What log lines add when the program forgot an ``await``."""
        verbs = self._holdings.not_awaited()
        self._told_of_await |= bool(verbs)
        return f" ({' and '.join(verbs)} was called without await)" if verbs else ""


def _level(error: MicroservingError) -> int:
    """A client's fault and its deadline are nobody else's business, being refused for a while is not worth attention;
    failures are."""
    if isinstance(error, (RequestError, DeadlineExceeded)) and not isinstance(error, LeaseError):
        return logging.DEBUG
    return logging.INFO if http_status(error) == HTTPStatus.SERVICE_UNAVAILABLE else logging.WARNING


def _logged(message: str) -> InternalError:
    error = InternalError(message)
    error.logged = True
    return error
