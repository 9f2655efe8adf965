"""The engine's thread, and the bridge from it to one asyncio event loop.

Owns: the thread "engine", which steps while there is work and sleeps otherwise; the streams that requests are read
from; the queue of those who wait for KV pages. Does not know: what a step does, HTTP.

Results cross to the loop by one ``call_soon_threadsafe`` per step. A reader that is slower than the engine finds the
chunks since its last read merged into one, so nothing grows but the text itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial

from microserving.engine.engine import Engine
from microserving.engine.jobs import LoadSnapshot, Reservation, SendDone, SendJob
from microserving.engine.statistics import Timings
from microserving.errors import EngineUnavailable, KVExhausted, MicroservingError, Overloaded, ShuttingDown
from microserving.grammar import GrammarCompiler
from microserving.protocol.generation import GenerationChunk, GenerationRequest

logger = logging.getLogger(__name__)

Delivery = Callable[[], None]


class AsyncEngine:
    """Everything but the thread itself is used from the loop that called ``start``."""

    def __init__(
        self,
        engine: Engine,
        *,
        reserve_wait_s: float = 5.0,
        max_waiting: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._reserve_wait_s = reserve_wait_s
        self._max_waiting = max_waiting
        self._clock = clock  # the engine's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._condition = threading.Condition()
        self._changes = 0
        self._stopping = False
        self._failed = False
        self._outbox: deque[Delivery] = deque()
        self._crossing = False  # the loop was told and has not come yet
        self._pages_freed = 0
        self._waiters: deque[_PageWaiter] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        engine.on_change = self._wake

    @property
    def engine(self) -> Engine:
        """Also the transport's ``LeaseObserver``."""
        return self._engine

    @property
    def healthy(self) -> bool:
        """The thread runs and accepts work."""
        return self._thread.is_alive() and not self._stopping and not self._failed

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    @property
    def grammars(self) -> GrammarCompiler:
        return self._engine.grammars

    async def start(self) -> None:
        """Start the thread. Once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End everything outstanding with ShuttingDown and join the thread (after its running step). Idempotent."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        self._engine.close(ShuttingDown())
        self._deliver()
        self._serve_waiters()

    async def generate(
        self, request: GenerationRequest, begin: int | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Stream the output; everything that can be refused is refused before the first chunk.

        Closing the generator, or cancelling its reader, aborts the request. Raises as ``Engine.submit``, and whatever
        the request ends with.
        """
        grammar = request.grammar
        compiled = None if grammar is None else await self.grammars.compile_off_loop(grammar)
        stream = _Stream()
        on_chunk = partial(self._post_chunk, stream)
        self._engine.submit(request, begin=begin, on_chunk=on_chunk, grammar=compiled)
        try:
            while True:
                chunk = await stream.next()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            if not stream.ended:
                self._engine.abort(request.request_id)

    async def send(self, job: SendJob) -> SendDone:
        """Compute and put. Raises as ``Engine.submit_send``, and whatever the send ends with.

        When it is cancelled it returns only after its last put has stopped.
        """
        future: asyncio.Future[SendDone] = asyncio.get_running_loop().create_future()
        self._engine.submit_send(job, lambda result: self._post(partial(_settle, future, result)))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._engine.abort_send(job.request_id)
            await _finished(future)
            raise

    async def prep_recv(
        self, request_id: str, prompt_token_ids: Sequence[int], end: int, cache_salt: str = ""
    ) -> Reservation:
        """As ``Engine.prep_recv``, but waits up to ``reserve_wait_s`` for pages, first come first served.

        Raises KVExhausted when they did not come free, Overloaded when too many wait.
        """
        reserve = partial(self._engine.prep_recv, request_id, tuple(prompt_token_ids), end, cache_salt)
        if not self._waiters:
            try:
                return reserve()
            except KVExhausted:
                if self._reserve_wait_s <= 0:
                    raise
        if len(self._waiters) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._waiters)} requests wait for KV pages", retry_after_s=self._reserve_wait_s
            )
        return await self._wait_for_pages(_PageWaiter(reserve), request_id)

    def abort(self, request_id: str) -> bool:
        return self._engine.abort(request_id)

    def renew(self, request_id: str) -> float:
        return self._engine.renew(request_id)

    def commit(self, request_id: str) -> int:
        return self._engine.commit(request_id)

    def match_prefix(self, prompt_token_ids: Sequence[int], cache_salt: str = "") -> int:
        return self._engine.match_prefix(prompt_token_ids, cache_salt)

    def timings(self) -> Timings:
        return self._engine.timings()

    def load(self) -> LoadSnapshot:
        """Those who wait for pages count as waiting."""
        load = self._engine.load()
        return dataclasses.replace(load, waiting=load.waiting + len(self._waiters))

    # --- the engine thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        """The wall: an engine that cannot go on ends its requests and says so, instead of hanging them."""
        try:
            while not self._stopping:
                seen = self._changes
                stepped = self._engine.step()
                self._flush()
                if not stepped:
                    self._sleep(seen)
        except Exception:
            logger.exception("the engine thread failed")
            self._failed = True
            self._engine.close(EngineUnavailable("the engine has failed"))
            self._flush()

    def _sleep(self, seen: int) -> None:
        """Until something changed since ``seen``, the engine has something to end, or it is time to stop."""
        deadline = self._engine.next_deadline
        timeout = None if deadline is None else max(0.0, deadline - self._clock())
        with self._condition:
            if self._changes == seen and not self._stopping:
                self._condition.wait(timeout)

    def _wake(self) -> None:
        """On any thread. What it brought waits for no running step."""
        with self._condition:
            self._changes += 1
            self._condition.notify()
        self._flush()

    def _flush(self) -> None:
        """Let the loop deliver what there is, unless it is about to. On any thread: two at once do no harm."""
        if self._loop is None or self._crossing:
            return
        if self._outbox or self._pages_freed != self._engine.pages_freed:
            self._crossing = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _post(self, delivery: Delivery) -> None:
        """Called by the engine, on any thread; a flush follows."""
        self._outbox.append(delivery)

    def _post_chunk(self, stream: _Stream, item: GenerationChunk | MicroservingError) -> None:
        if isinstance(item, MicroservingError) or item.finish_reason is not None:
            stream.ended = True
        self._post(partial(stream.put, item))

    # --- the loop --------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        self._crossing = False  # before the outbox is emptied: what is posted from here on crosses anew
        while self._outbox:
            self._outbox.popleft()()
        freed = self._engine.pages_freed
        if freed != self._pages_freed:
            self._pages_freed = freed
            self._serve_waiters()

    async def _wait_for_pages(self, waiter: _PageWaiter, request_id: str) -> Reservation:
        self._waiters.append(waiter)
        try:
            await asyncio.wait({waiter.future}, timeout=self._reserve_wait_s)
        except asyncio.CancelledError:
            if waiter.reserved:
                self._engine.abort(request_id)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._serve_waiters()  # the next one may need fewer pages
        if not waiter.future.done():
            raise KVExhausted(
                f"no KV pages came free within {self._reserve_wait_s} s", retry_after_s=self._reserve_wait_s
            )
        return waiter.future.result()

    def _serve_waiters(self) -> None:
        """In order; the first that still finds no pages keeps the others waiting."""
        while self._waiters and self._waiters[0].try_again():
            self._waiters.popleft()


class _PageWaiter:
    """Someone who waits for pages."""

    def __init__(self, reserve: Callable[[], Reservation]) -> None:
        self._reserve = reserve
        self.future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()

    @property
    def reserved(self) -> bool:
        return self.future.done() and self.future.exception() is None

    def try_again(self) -> bool:
        """True when the wait is over: pages, or an error other than KVExhausted."""
        try:
            self.future.set_result(self._reserve())
        except KVExhausted:
            return False
        except MicroservingError as error:
            self.future.set_exception(error)
        return True


class _Stream:
    """What a request has to say to its one reader; chunks that wait are merged."""

    def __init__(self) -> None:
        self.ended = False  # the engine has forgotten the request
        self._pending: GenerationChunk | None = None
        self._error: MicroservingError | None = None
        self._ready = asyncio.Event()

    def put(self, item: GenerationChunk | MicroservingError) -> None:
        if isinstance(item, MicroservingError):
            self._error = item
        else:
            self._pending = item if self._pending is None else _merged(self._pending, item)
        self._ready.set()

    async def next(self) -> GenerationChunk:
        """The chunks since the last call. Raises what the request ended with, after all chunks."""
        await self._ready.wait()
        chunk, self._pending = self._pending, None
        if chunk is not None:
            if self._error is None:
                self._ready.clear()
            return chunk
        assert self._error is not None
        raise self._error


def _merged(first: GenerationChunk, then: GenerationChunk) -> GenerationChunk:
    return dataclasses.replace(
        then,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
        prompt_logprobs=first.prompt_logprobs or then.prompt_logprobs,
    )


def _settle(future: asyncio.Future[SendDone], result: SendDone | MicroservingError) -> None:
    if isinstance(result, MicroservingError):
        future.set_exception(result)
    else:
        future.set_result(result)


async def _finished(future: asyncio.Future[SendDone]) -> None:
    """Wait for the future whatever happens to the waiting task, and look at its error so that nobody complains."""
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            continue
    future.exception()
