"""One run: sends a workload's requests at the times that the arrivals say, and gives what was measured.

Open loops are open: a request is sent when it is due, whatever became of those before it, and its latencies count from
the time that it was due. Texts are made before the run: to make them while answers come would delay the client's clock.
Owns the tasks of a run; all have ended when ``run`` returns.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from microserving.bench.arrivals import Arrivals, Closed, OpenArrivals
from microserving.bench.client import Wire, measure
from microserving.bench.measurement import INTERRUPTED, Measured
from microserving.bench.workloads import Ask, Session, Workload

_MAX_PREPARED = 1000
"""Conversations, of memory and of the time before a run; later ones are made between two sends."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """sessions: conversations that are counted, after ``warmup`` ones that are not. keep_load: go on sending until those
    that are counted have ended, so that the last ones do not find an idle server. max_concurrency: of the client."""

    sessions: int
    warmup: int = 0
    keep_load: bool = True
    max_concurrency: int | None = None


class Load:
    """A run, once."""

    def __init__(
        self,
        wire: Wire,
        workload: Workload,
        arrivals: Arrivals,
        settings: LoadSettings,
        on_change: Callable[[Load], None] | None = None,
    ) -> None:
        """on_change: called when a request was sent or has ended. running: requests that were sent and have not ended;
        failed: counted ones."""
        self.records: list[Measured] = []
        self.began = 0.0
        self.running = 0
        self.failed = 0
        self._wire = wire
        self._workload = workload
        self._arrivals = arrivals
        self._warmup = settings.warmup
        self._counted = settings.sessions
        if len(workload):
            self._counted = max(0, min(self._counted, len(workload) - self._warmup))
        self._keep_load = settings.keep_load
        self._gate = None if settings.max_concurrency is None else asyncio.Semaphore(settings.max_concurrency)
        self._on_change = on_change or (lambda _: None)
        self._left = self._counted
        self._prepared: dict[int, tuple[Session, Ask]] = {}
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None

    @property
    def sessions(self) -> int:
        """Conversations that are counted."""
        return self._counted

    @property
    def sessions_done(self) -> int:
        return self._counted - self._left

    def clock(self) -> float:
        """Seconds since the run began."""
        return asyncio.get_running_loop().time() - self.began

    def stop(self) -> None:
        """End the run now; what is under way counts as interrupted."""
        self._over.set()

    async def prepare(self) -> None:
        """Make the first requests of the conversations that are counted, and of as many that keep up the load."""
        wanted = self._warmup + self._counted * (2 if self._keep_load else 1)
        for number in itertools.islice(self._numbers(), min(wanted, _MAX_PREPARED)):
            if self._over.is_set():
                return
            self._prepared[number] = self._open(number)
            await asyncio.sleep(0)  # others go on

    async def run(self) -> list[Measured]:
        """The records of all that was sent, in the order of their scheduled times."""
        self.began = asyncio.get_running_loop().time()
        if not self._left:
            self._over.set()
        try:
            if isinstance(self._arrivals, Closed):
                await self._run_closed(self._arrivals.concurrency)
            else:
                await self._run_open(self._arrivals)
            await self._over.wait()
        finally:
            await self._end_tasks()
        if self._bug is not None:
            raise self._bug
        return sorted(self.records, key=lambda record: record.scheduled)

    async def _run_open(self, arrivals: OpenArrivals) -> None:
        for number, offset in zip(self._numbers(), arrivals.times(), strict=False):
            if number not in self._prepared and not await self._until((self.clock() + offset) / 2):
                return
            session, ask = self._open(number)  # half-way at the earliest: the one before has been sent
            if not await self._until(offset):
                return
            self._start(self._converse(number, session, ask, offset))

    async def _run_closed(self, concurrency: int) -> None:
        numbers = self._numbers()
        for _ in range(concurrency):
            self._start(self._keep_conversing(numbers))

    async def _keep_conversing(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            session, ask = self._open(number)
            await self._converse(number, session, ask, self.clock())

    def _open(self, number: int) -> tuple[Session, Ask]:
        """A conversation and its first request."""
        if (prepared := self._prepared.pop(number, None)) is not None:
            return prepared
        session = self._workload.session(number)
        return session, next(session)

    def _numbers(self) -> Iterator[int]:
        """Of the conversations that there are to send."""
        end = len(self._workload) or None
        if not self._keep_load:
            end = self._warmup + self._counted
        return iter(range(end)) if end is not None else itertools.count()

    async def _until(self, offset: float) -> bool:
        """Wait for that time; False when the run is over before."""
        try:
            async with asyncio.timeout_at(self.began + offset):
                await self._over.wait()
        except TimeoutError:
            return True
        return False

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bug = bug
            self._over.set()

    async def _converse(self, number: int, session: Session, ask: Ask, scheduled: float) -> None:
        counted = self._warmup <= number < self._warmup + self._counted
        for turn in itertools.count():
            record = Measured(number, scheduled, turn, ask.phase, counted)
            self.records.append(record)
            text = await self._send(ask, record)
            try:
                if record.error is not None:
                    break
                ask = session.send(text)
            except StopIteration:
                break
            scheduled = record.ended + ask.think_s if record.ended is not None else self.clock()
            if not await self._until(scheduled):
                return
        self._ended(counted)

    async def _send(self, ask: Ask, record: Measured) -> str:
        """One request, when the client may; the text of its answer."""
        async with self._gate or nullcontext():
            self.running += 1
            self._on_change(self)
            try:
                text = await measure(self._wire, ask.path, ask.body, record, self.clock)
            finally:
                self.running -= 1
        self.failed += record.counted and record.error is not None
        return text

    def _ended(self, counted: bool) -> None:
        self._left -= counted
        self._on_change(self)
        if not self._left:
            self._over.set()

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for record in self.records:
            if record.ended is None and record.error is None:
                record.error = INTERRUPTED
