"""What one attempt to serve a request holds on engines, and giving it back.

Engines reach the program wrapped in ``HeldEngine``s, so nothing is held that is not written down here first. That is
also what the in-flight counters count. Knows no HTTP and no program.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any, Literal, TypeVar

from microserving.errors import EngineUnavailable, InternalError, MicroservingError, Overloaded
from microserving.policies import EngineLoad, PrefixIndex
from microserving.program import EngineClient, EngineRole, Received, Request
from microserving.protocol.generation import GenerationChunk, RemoteSendResult
from microserving.router.alarms import Alarms
from microserving.router.chunk_stream import ChunkStream, readable
from microserving.router.endings import abort_within, close_within
from microserving.router.in_flight import InFlight
from microserving.router.ledger import AttemptRecord
from microserving.router.renewals import Renewals
from microserving.router.retries import is_engines_fault

Kind = Literal["reservation", "send", "generation"]
ResultT = TypeVar("ResultT")
_MANY_CALLS = 16
"""Of a program's calls: then those that have begun are forgotten."""
_LATE_S = 5.0
"""How long an engine may take to take back what it gave after the end."""
_REFUSAL_S = 0.05
"""What a refusal takes: a program that tries again for ever must not keep the event loop busy."""


class _Hold:
    """What one engine holds for one request id. renewed: whether its lease is kept alive."""

    __slots__ = ("kinds", "renewed", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.kinds: set[Kind] = set()
        self.renewed = False


class Holdings:
    """The reservations, sends and generations of one attempt. ``in_flight`` is shared by all attempts.

    record: where the attempt's facts are written down; index: where, what engines had cached. alarms: shared. busy:
    answers of engines that are waited for now; moves: those that came. failed: the engines that failed, or whose peer in
    a transfer did. unbegun: calls of the program that nobody has begun to await. closed: nothing can be taken any more.
    """

    __slots__ = (
        "_alarms",
        "_called",
        "_claims",
        "_engines",
        "_held",
        "_in_flight",
        "_index",
        "_renewals",
        "_streams",
        "busy",
        "closed",
        "failed",
        "moves",
        "record",
        "unbegun",
    )

    def __init__(
        self,
        in_flight: InFlight,
        record: AttemptRecord | None = None,
        index: PrefixIndex | None = None,
        alarms: Alarms | None = None,
    ) -> None:
        self.record = AttemptRecord("") if record is None else record
        self._index = index
        self._alarms = alarms
        self.busy = self.moves = self.unbegun = 0
        self.closed = False
        self.failed: set[EngineClient] = set()
        self._in_flight = in_flight
        self._claims: set[EngineClient] = set()
        self._held: dict[tuple[EngineClient, str], _Hold] = {}
        self._engines: dict[EngineClient, HeldEngine] = {}
        self._streams: list[HeldStream] = []
        self._renewals: Renewals | None = None
        self._called: list[tuple[str, Coroutine[Any, Any, Any]]] = []

    def __bool__(self) -> bool:
        """Whether anything is held, or a call that was never begun is left."""
        return bool(self._held) or self.unbegun > 0

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
        claims = self._claims
        if self.closed or engine in claims:
            return self.bind(engine)
        if not (self._held and any(held is engine for held, _ in self._held)):
            claims.add(engine)
            self._in_flight[engine] += 1
        return self.bind(engine)

    def close(self) -> None:
        """The attempt is over: a task that its program left behind gets nothing any more. Idempotent."""
        self.closed = True
        self.unclaim()

    async def refuse(self) -> None:
        """When ``closed``: raises InternalError."""
        await asyncio.sleep(_REFUSAL_S)
        raise InternalError("the request has ended: nothing can be done on an engine for it any more")

    async def take_back(self, engine: EngineClient, request: Request) -> None:
        """``engine`` may have given something when nobody wanted it any more."""
        await abort_within(engine, request, _LATE_S)

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
        self.unbegun += 1
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
        key = engine, request.request_id
        hold = self._held.get(key)
        if hold is None:
            hold = self._held[key] = _Hold(request)
            if engine in self._claims:
                self._claims.remove(engine)
            else:
                self._in_flight[engine] += 1
        elif kind in hold.kinds:
            return False
        hold.kinds.add(kind)
        return True

    def drop(self, engine: EngineClient, request: Request, *kinds: Kind) -> None:
        """The engine no longer holds these. Idempotent."""
        key = engine, request.request_id
        hold = self._held.get(key)
        if hold is None:
            return
        if hold.renewed and "reservation" in kinds:
            self._stop_renewing(engine, hold)
        hold.kinds.difference_update(kinds)
        if not hold.kinds:
            del self._held[key]
            self._leave(engine)

    def received(self, received: Received, engine: EngineClient, request: Request) -> None:
        """``engine`` made a reservation: it is renewed until it is used, dropped or released."""
        record = self.record
        record.split_at, record.prefix_matched_length = received.end, received.prefix_matched_length
        if self._index is not None:
            self._index.observe(request.request_id, engine.id, received.prefix_matched_length)
        hold = self._held.get((engine, request.request_id))
        if received.lease_ttl_s is not None and hold is not None and "reservation" in hold.kinds:
            if self._renewals is None:
                self._renewals = Renewals(self._alarms)
            hold.renewed = True
            self._renewals.start(engine, request, received.lease_ttl_s)

    def use(self, engine: EngineClient, request: Request) -> None:
        """The engine is asked to generate from the request's reservation, if there is one: that ends the lease."""
        hold = self._held.get((engine, request.request_id))
        if hold is not None and hold.renewed:
            self._stop_renewing(engine, hold)

    def _stop_renewing(self, engine: EngineClient, hold: _Hold) -> None:
        hold.renewed = False
        if self._renewals is not None:
            self._renewals.stop(engine, hold.request.request_id)

    async def asked(self, work: Awaitable[ResultT]) -> ResultT:
        """``work``, an engine's answer."""
        self.busy += 1
        try:
            return await work
        finally:
            self.busy -= 1
            self.moves += 1

    def refused(
        self,
        error: MicroservingError,
        engine: EngineClient,
        request: Request,
        taken: Kind | None,
        receiver: EngineClient | None = None,
    ) -> None:
        """``engine`` failed with ``error``; the request's next attempt does without it. An engine that refused holds
        nothing of what was ``taken`` for the call; one that failed may.

        receiver: of a transfer, of which nobody knows which end failed, unless the sender is full: the receiver has made
        room.
        """
        if is_engines_fault(error):
            self.failed.add(engine)
            if receiver is not None and not isinstance(error, Overloaded):
                self.failed.add(receiver)
        if taken is not None and not isinstance(error, EngineUnavailable):
            self.drop(engine, request, taken)

    def found_cached(self, engine: EngineClient, request: Request, tokens: int) -> None:
        """The engine said how much of the prompt it had."""
        if self._index is not None:
            self._index.observe(request.request_id, engine.id, tokens)

    def watch(self, stream: HeldStream) -> None:
        """Have ``stream`` closed by ``release``, wherever the program left it."""
        self._streams.append(stream)

    async def release(self, timeout_s: float) -> None:
        """``close``; close the streams, too, and abort all that is still held. Each engine has ``timeout_s``; never raises
        for one."""
        self.close()
        try:
            if self._renewals is not None:
                await self._renewals.close()
            for stream in self._streams:
                await close_within(stream, timeout_s)
            held = [(engine, hold.request) for (engine, _), hold in self._held.items()]
            await asyncio.gather(*(abort_within(engine, request, timeout_s) for engine, request in held))
        finally:
            for (engine, _), hold in list(self._held.items()):
                self.drop(engine, hold.request, *hold.kinds)

    def _leave(self, engine: EngineClient) -> None:
        left = self._in_flight[engine] - 1
        if left:
            self._in_flight[engine] = left
        else:
            del self._in_flight[engine]


class HeldEngine(EngineClient):
    """An engine whose verbs are written down in ``holdings``."""

    __slots__ = ("_holdings", "_inner")

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
        holdings, engine = self._holdings, self._inner
        holdings.unbegun -= 1
        if holdings.closed:
            await holdings.refuse()
        is_new = holdings.take(engine, request, "reservation")
        holdings.busy += 1
        try:
            received = await engine.prep_recv(request, end=end)
        except MicroservingError as error:
            holdings.refused(error, engine, request, "reservation" if is_new else None)
            if holdings.closed:
                await holdings.take_back(engine, request)
            raise
        finally:
            holdings.busy -= 1
            holdings.moves += 1
        if holdings.closed:
            await holdings.take_back(engine, request)
            await holdings.refuse()
        holdings.received(received, engine, request)
        return Received(
            received.kv_append_metadata,
            received.prefix_matched_length,
            received.end,
            self,
            received.rank,
            received.lease_ttl_s,
        )

    async def _remote_send(self, request: Request, to: Received) -> RemoteSendResult:
        holdings, engine = self._holdings, self._inner
        holdings.unbegun -= 1
        if holdings.closed:
            await holdings.refuse()
        if to.complete:
            return await engine.remote_send(request, to=to)
        holdings.record.sending(engine)
        receiver = to.engine._inner if isinstance(to.engine, HeldEngine) else to.engine
        is_new = holdings.take(engine, request, "send")
        holdings.busy += 1
        try:
            result = await receiver.while_answering(engine.remote_send(request, to=to))
        except MicroservingError as error:
            holdings.refused(error, engine, request, "send" if is_new else None, receiver)
            if holdings.closed:
                await holdings.take_back(engine, request)
            raise
        finally:
            holdings.busy -= 1
            holdings.moves += 1
        holdings.drop(engine, request, "send")
        holdings.record.sent(result)
        return result

    def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        return HeldStream(self._inner, self._holdings, request, begin)

    def commit(self, request: Request) -> Coroutine[Any, Any, int]:
        return self._holdings.called("commit", self._commit(request))

    async def _commit(self, request: Request) -> int:
        self._holdings.unbegun -= 1
        if self._holdings.closed:
            await self._holdings.refuse()
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


class HeldStream(AsyncIterator[GenerationChunk]):
    """The chunks of a generation that is written down in ``holdings`` from the first step on until the engine is done
    with it; one that was left before, or failed, stays held for ``release``. Iterate once."""

    __slots__ = (
        "_begin",
        "_cached",
        "_engine",
        "_finished",
        "_holdings",
        "_is_new",
        "_over",
        "_request",
        "_stream",
    )

    def __init__(self, engine: EngineClient, holdings: Holdings, request: Request, begin: int) -> None:
        self._engine = engine
        self._holdings = holdings
        self._request = request
        self._begin = begin
        self._is_new = False
        self._stream: ChunkStream | None = None
        self._finished = self._over = False
        self._cached = 0

    async def __anext__(self) -> GenerationChunk:
        if self._over:
            raise StopAsyncIteration
        stream = await self._start() if self._stream is None else self._stream
        try:
            while (chunk := stream.take()) is None:
                self._holdings.busy += 1
                try:
                    await stream.more()
                finally:
                    self._holdings.busy -= 1
        except StopAsyncIteration:
            self._end()
            if not self._finished and self._holdings.closed:
                await self._holdings.refuse()
            raise
        except BaseException as error:
            self._over = True
            stream.leave()
            if isinstance(error, MicroservingError):
                taken: Kind | None = "generation" if self._is_new else None
                self._holdings.refused(error, self._engine, self._request, taken)
            raise
        if chunk.finish_reason is not None:
            self._finished, self._cached = True, chunk.cached_tokens
        return chunk

    async def aclose(self) -> None:
        """Idempotent."""
        self._over = True
        if self._stream is not None:
            await self._stream.aclose()

    async def _start(self) -> ChunkStream:
        holdings, engine, request = self._holdings, self._engine, self._request
        if holdings.closed:
            await holdings.refuse()
        try:
            self._stream = stream = readable(aiter(engine.start_generate(request, begin=self._begin)))
        except MicroservingError as error:
            self._over = True
            holdings.refused(error, engine, request, None)
            raise
        holdings.watch(self)
        holdings.use(engine, request)
        holdings.record.generating(engine)
        self._is_new = holdings.take(engine, request, "generation")
        return stream

    def _end(self) -> None:
        self._over = True
        if self._finished:
            self._holdings.found_cached(self._engine, self._request, self._cached)
            self._holdings.drop(self._engine, self._request, "reservation", "generation")


def _is_unstarted(called: tuple[str, Any]) -> bool:
    call = called[1]  # inspect.getcoroutinestate, at a tenth of the price
    return call.cr_frame is not None and not call.cr_running and not call.cr_suspended
