"""What one attempt to serve a request holds on engines, and giving it back.

Engines reach the program wrapped in ``HeldEngine``s, so nothing is held that is not written down here first. That is
also what the in-flight counters count. Knows no HTTP and no program.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine
from typing import Any, Literal, TypeVar

from microserving.errors import EngineUnavailable, MicroservingError, Overloaded
from microserving.policies import EngineLoad, PrefixIndex
from microserving.program import EngineClient, EngineRole, Received, Request
from microserving.protocol.generation import GenerationChunk, RemoteSendResult
from microserving.router.in_flight import InFlight
from microserving.router.ledger import AttemptRecord
from microserving.router.renewals import Renewals
from microserving.router.retries import is_engines_fault

_logger = logging.getLogger(__name__)

Kind = Literal["reservation", "send", "generation"]
ResultT = TypeVar("ResultT")
_MANY_CALLS = 16
"""Of a program's calls: then those that have begun are forgotten."""


class Holdings:
    """The reservations, sends and generations of one attempt. ``in_flight`` is shared by all attempts.

    record: where the attempt's facts are written down; index: where, what engines had cached. busy: answers of engines
    that are waited for now; moves: those that came. failed: the engines that failed, or whose peer in a transfer did.
    """

    def __init__(
        self, in_flight: InFlight, record: AttemptRecord | None = None, index: PrefixIndex | None = None
    ) -> None:
        self.record = AttemptRecord("") if record is None else record
        self._index = index
        self.busy = 0
        self.moves = 0
        self.failed: set[EngineClient] = set()
        self._in_flight = in_flight
        self._claims: set[EngineClient] = set()
        self._held: dict[tuple[EngineClient, str], tuple[Request, set[Kind]]] = {}
        self._engines: dict[EngineClient, HeldEngine] = {}
        self._streams: list[AsyncGenerator[GenerationChunk, None]] = []
        self._renewals = Renewals()
        self._called: list[tuple[str, Coroutine[Any, Any, Any]]] = []

    def __bool__(self) -> bool:
        """Whether anything is held, or a call that was never begun is left."""
        return bool(self._held) or any(map(_is_unstarted, self._called))

    @property
    def engines(self) -> set[EngineClient]:
        """The engines that were chosen, or hold something."""
        return self._claims | {engine for engine, _ in self._held}

    def bind(self, engine: EngineClient) -> HeldEngine:
        """``engine`` as the program gets it."""
        held = self._engines.get(engine)
        if held is None:
            held = self._engines[engine] = HeldEngine(engine, self)
        return held

    def choose(self, engine: EngineClient) -> HeldEngine:
        """``engine`` as a policy chose it. It counts from now on, so that the next request sees it when it chooses,
        although the program may first wait for another engine."""
        if engine not in self._claims and not any(held is engine for held, _ in self._held):
            self._claims.add(engine)
            self._in_flight[engine] += 1
        return self.bind(engine)

    def unclaim(self) -> None:
        """No engine that was chosen and never asked counts any more. Idempotent."""
        if not self._claims:
            return
        for engine in self._claims:
            self._leave(engine)
        self._claims.clear()

    def called(self, verb: str, call: Coroutine[Any, Any, ResultT]) -> Coroutine[Any, Any, ResultT]:
        """Notice a verb that the program calls and does not await."""
        if len(self._called) == _MANY_CALLS:
            self._called = [*filter(_is_unstarted, self._called)]
        self._called.append((verb, call))
        return call

    def not_awaited(self) -> list[str]:
        """The verbs that were called and never begun."""
        return [verb for verb, _ in filter(_is_unstarted, self._called)]

    def close_calls(self) -> None:
        """Nobody will await them any more."""
        for _, call in filter(_is_unstarted, self._called):
            call.close()

    def take(self, engine: EngineClient, request: Request, kind: Kind) -> bool:
        """Write down a hold before the engine is asked for it. False: it was held before."""
        key = (engine, request.request_id)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = (request, set())
            if engine in self._claims:
                self._claims.remove(engine)
            else:
                self._in_flight[engine] += 1
        kinds = held[1]
        is_new = kind not in kinds
        kinds.add(kind)
        return is_new

    def drop(self, engine: EngineClient, request: Request, *kinds: Kind) -> None:
        """The engine no longer holds these. Idempotent."""
        key = (engine, request.request_id)
        held = self._held.get(key)
        if held is None:
            return
        if "reservation" in kinds:
            self._renewals.stop(engine, request.request_id)
        left = held[1]
        left.difference_update(kinds)
        if not left:
            self._forget(key)

    def keep_alive(self, received: Received, engine: EngineClient, request: Request) -> None:
        """Renew a reservation that ``engine`` made, until it is used, dropped or released."""
        key = (engine, request.request_id)
        if received.lease_ttl_s is not None and "reservation" in self._held.get(key, (None, ()))[1]:
            self._renewals.start(engine, request, received.lease_ttl_s)

    def use(self, engine: EngineClient, request: Request) -> None:
        """The engine is asked to generate from the request's reservation, if there is one: that ends the lease."""
        self._renewals.stop(engine, request.request_id)

    async def asked(self, work: Awaitable[ResultT]) -> ResultT:
        """``work``, an engine's answer."""
        self.busy += 1
        try:
            return await work
        finally:
            self.busy -= 1
            self.moves += 1

    def blame(self, error: MicroservingError, engine: EngineClient, receiver: EngineClient | None) -> None:
        """``engine`` failed with ``error``; the request's next attempt does without it. Of a transfer nobody knows which
        end failed, unless the sender is full: the receiver has made room."""
        if is_engines_fault(error):
            self.failed.add(engine)
            if receiver is not None and not isinstance(error, Overloaded):
                self.failed.add(receiver)

    def found_cached(self, engine: EngineClient, request: Request, tokens: int) -> None:
        """The engine said how much of the prompt it had."""
        if self._index is not None:
            self._index.observe(request.request_id, engine.id, tokens)

    def watch(self, stream: AsyncGenerator[GenerationChunk, None]) -> AsyncIterator[GenerationChunk]:
        """Have ``stream`` closed by ``release``, wherever the program left it."""
        self._streams.append(stream)
        return stream

    async def release(self, timeout_s: float) -> None:
        """Close the streams and abort all that is still held. Each engine has ``timeout_s``; never raises for one."""
        try:
            await self._renewals.close()
            for stream in self._streams:
                await close_within(stream, timeout_s)
            held = [(engine, request) for (engine, _), (request, _) in self._held.items()]
            await asyncio.gather(*(_abort(engine, request, timeout_s) for engine, request in held))
        finally:
            for key in list(self._held):
                self._forget(key)

    def _forget(self, key: tuple[EngineClient, str]) -> None:
        self._renewals.stop(*key)
        del self._held[key]
        self._leave(key[0])

    def _leave(self, engine: EngineClient) -> None:
        self._in_flight[engine] -= 1
        if not self._in_flight[engine]:
            del self._in_flight[engine]


class HeldEngine(EngineClient):
    """An engine whose verbs are written down in ``holdings``."""

    def __init__(self, inner: EngineClient, holdings: Holdings) -> None:
        self._inner = inner
        self._holdings = holdings

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def role(self) -> EngineRole:
        return self._inner.role

    @property
    def in_flight(self) -> int:
        return self._inner.in_flight

    @property
    def load(self) -> EngineLoad:
        return self._inner.load

    def prep_recv(self, request: Request, *, end: int) -> Coroutine[Any, Any, Received]:
        return self._holdings.called("prep_recv", self._prep_recv(request, end))

    def remote_send(self, request: Request, *, to: Received) -> Coroutine[Any, Any, RemoteSendResult]:
        return self._holdings.called("remote_send", self._remote_send(request, to))

    async def _prep_recv(self, request: Request, end: int) -> Received:
        holdings = self._holdings
        with _Asking(holdings, self._inner, request, "reservation", None):
            received = await self._inner.prep_recv(request, end=end)
        holdings.record.reserved(received.end, received.prefix_matched_length)
        holdings.found_cached(self._inner, request, received.prefix_matched_length)
        holdings.keep_alive(received, self._inner, request)
        return Received(
            received.kv_append_metadata,
            received.prefix_matched_length,
            received.end,
            self,
            received.rank,
            received.lease_ttl_s,
        )

    async def _remote_send(self, request: Request, to: Received) -> RemoteSendResult:
        if to.complete:
            return await self._inner.remote_send(request, to=to)
        self._holdings.record.sending(self._inner)
        receiver = to.engine._inner if isinstance(to.engine, HeldEngine) else to.engine
        with _Asking(self._holdings, self._inner, request, "send", receiver):
            result = await receiver.while_answering(self._inner.remote_send(request, to=to))
        self._holdings.drop(self._inner, request, "send")
        self._holdings.record.sent(result)
        return result

    def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        return self._holdings.watch(self._generate(request, begin))

    def commit(self, request: Request) -> Coroutine[Any, Any, int]:
        return self._holdings.called("commit", self._commit(request))

    async def _commit(self, request: Request) -> int:
        self._holdings.use(self._inner, request)
        cached = await self._holdings.asked(self._inner.commit(request))
        self._holdings.drop(self._inner, request, "reservation")
        return cached

    async def abort(self, request: Request) -> None:
        await self._inner.abort(request)
        self._holdings.drop(self._inner, request, "reservation", "send", "generation")

    async def renew(self, request: Request) -> float | None:
        return await self._inner.renew(request)

    async def while_answering(self, work: Awaitable[ResultT]) -> ResultT:
        return await self._inner.while_answering(work)

    async def match_prefix(self, request: Request) -> int:
        return await self._holdings.asked(self._inner.match_prefix(request))

    async def _generate(self, request: Request, begin: int) -> AsyncGenerator[GenerationChunk, None]:
        holdings = self._holdings
        holdings.use(self._inner, request)
        holdings.record.generating(self._inner)
        with _Holding(holdings, self._inner, request, "generation", None):
            chunks = aiter(self._inner.start_generate(request, begin=begin))
            finished, cached = False, 0
            try:
                while True:
                    holdings.busy += 1
                    try:
                        chunk = await chunks.__anext__()
                    except StopAsyncIteration:
                        break
                    finally:
                        holdings.busy -= 1
                    finished, cached = chunk.finish_reason is not None, chunk.cached_tokens
                    yield chunk
            finally:
                await close(chunks)
        if finished:
            holdings.found_cached(self._inner, request, cached)
            holdings.drop(self._inner, request, "reservation", "generation")


class _Holding:
    """Around a verb. An engine that refused it holds nothing; one that failed, or was not waited for, may.

    receiver: of a transfer, whose failure the sender reports as its own.
    """

    __slots__ = ("_engine", "_holdings", "_is_new", "_kind", "_receiver", "_request")

    def __init__(
        self,
        holdings: Holdings,
        engine: EngineClient,
        request: Request,
        kind: Kind,
        receiver: EngineClient | None,
    ) -> None:
        self._holdings = holdings
        self._engine = engine
        self._request = request
        self._kind: Kind = kind
        self._receiver = receiver

    def __enter__(self) -> None:
        self._is_new = self._holdings.take(self._engine, self._request, self._kind)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, MicroservingError):
            self._holdings.blame(error, self._engine, self._receiver)
            if self._is_new and not isinstance(error, EngineUnavailable):
                self._holdings.drop(self._engine, self._request, self._kind)


class _Asking(_Holding):
    """The same around a verb that is one answer, which is waited for all the while."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._is_new = self._holdings.take(self._engine, self._request, self._kind)
        self._holdings.busy += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._holdings.busy -= 1
        self._holdings.moves += 1
        if error is not None:
            super().__exit__(kind, error, trace)


async def close(chunks: AsyncIterator[Any]) -> None:
    """Close ``chunks`` when it can be closed (an async generator can), unless it has ended."""
    if getattr(chunks, "ag_frame", chunks) is None:
        return
    aclose = getattr(chunks, "aclose", None)
    if aclose is not None:
        await aclose()


async def close_within(chunks: AsyncIterator[Any], timeout_s: float) -> None:
    """``close``, but bounded, and an error is only logged: there is nobody left to tell."""
    if getattr(chunks, "ag_frame", chunks) is None:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await close(chunks)
    except (MicroservingError, TimeoutError, RuntimeError) as error:
        _logger.warning("a stream did not close: %r", error)


async def _abort(engine: EngineClient, request: Request, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await engine.abort(request)
    except (MicroservingError, TimeoutError) as error:
        # Of an engine that is gone the registry has told already.
        level = logging.INFO if isinstance(error, EngineUnavailable) else logging.WARNING
        _logger.log(level, "could not abort request %s on %s: %s", request.request_id, engine.id, error)


def _is_unstarted(called: tuple[str, Any]) -> bool:
    call = called[1]  # inspect.getcoroutinestate, at a tenth of the price
    return call.cr_frame is not None and not call.cr_running and not call.cr_suspended
