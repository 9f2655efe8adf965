"""Both ends of a KV hand-off: `prep_recv`'s descriptor at the receiver, all of `remote_send` at the sender.

Owns the order of the steps and who is told what when one fails. Does not know HTTP, how pages are reserved, how the
model runs or how bytes get there: those are the scheduler, the engine and the transport.

A lease that ends while its writer computes stops the puts before the next layer (the job's guard: the put kernel reads
a word of the receiver's memory) and the writer before its next step (chunk): the receiver says so over the link. Until
the writer has said that it stopped the pages are quarantined, so a put that had begun harms nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from microserving.engine.jobs import Reservation, SendDone, SendJob, StepTimes
from microserving.errors import (
    EngineUnavailable,
    InvalidRequest,
    LeaseError,
    MicroservingError,
    TransferFailed,
)
from microserving.protocol.generation import RemoteSendResult
from microserving.protocol.kv_descriptor import (
    KVDescriptor,
    SendRange,
    check_descriptor,
    check_secret,
    check_slots_fit,
    decode_descriptor,
    encode_descriptor,
    hash_prompt,
    segments_from_slots,
    slots_from_segments,
)
from microserving.protocol.kv_layout import KVLayout
from microserving.transports.base import Connection, Lease, LeaseGuard, RemotePool, Transport

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_CONNECTING = 64
"""Receivers to which a link is made at once. That takes well under a millisecond unless the receiver is stopped."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Who receives: the engine's id, this process of it, its rank."""

    engine_id: str
    epoch: str
    rank: int


class HandoffReceiver:
    """Writes the descriptors of this engine's reservations. wall: unix seconds."""

    def __init__(
        self,
        identity: EngineIdentity,
        layout: KVLayout,
        model_hash: str,
        secret: bytes | None,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError when the secret is too short."""
        self._identity = identity
        self._layout = layout
        self._model_hash = model_hash
        self._secret = check_secret(secret)
        self._wall = wall

    def descriptor(self, reservation: Reservation) -> str:
        """The `kv_append_metadata` of positions [prefix_matched_length, end) of a fresh reservation."""
        return encode_descriptor(
            KVDescriptor(
                engine_id=self._identity.engine_id,
                epoch=self._identity.epoch,
                rank=self._identity.rank,
                request_id=reservation.request_id,
                lease_id=reservation.lease_id,
                layout_hash=self._layout.hash,
                model_hash=self._model_hash,
                prompt_hash=hash_prompt(reservation.prompt_token_ids[: reservation.end]),
                begin=reservation.prefix_matched_length,
                segments=segments_from_slots(reservation.slots),
                nbytes=len(reservation.slots) * self._layout.bytes_per_token,
                expires_at=self._wall() + reservation.lease_ttl_s,
            ),
            self._secret,
        )


class SendEngine(Protocol):
    """The engine as the sender needs it (``AsyncEngine``)."""

    async def send(self, job: SendJob) -> SendDone:
        """Compute and put. Raises MicroservingError.

        However it ends (cancelled, too), no put of the job runs any more and none will: the pages may go to others.
        """


class HandoffSender:
    """Runs `remote_send`. Used from one event loop.

    timeout_s bounds each hand-shake with the receiver. The receiver alone decides whether its lease still lives (it
    may have been renewed): at begin and at finish. The expiry in the descriptor is checked before anything starts.
    """

    def __init__(
        self,
        transport: Transport,
        engine: SendEngine,
        layout: KVLayout,
        model_hash: str,
        secret: bytes | None,
        *,
        timeout_s: float,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError when the secret is too short."""
        self._transport = transport
        self._engine = engine
        self._layout = layout
        self._model_hash = model_hash
        self._secret = check_secret(secret)
        self._timeout_s = timeout_s
        self._now_ns = monotonic_ns
        self._wall = wall
        self._threads = ThreadPoolExecutor(MAX_CONNECTING, thread_name_prefix="kv-connect")
        self._connecting: dict[tuple[str, str], asyncio.Future[Connection]] = {}
        self._running: set[asyncio.Task[RemoteSendResult]] = set()
        self._closed = False

    async def send(
        self,
        prompt: Sequence[int],
        begin: int,
        end: int,
        kv_addr_info: str,
        recv_rank: int,
        request_id: str,
        cache_salt: str = "",
    ) -> RemoteSendResult:
        """Compute the KV of prompt[begin:end] and put it where ``kv_addr_info`` says.

        begin, end: already resolved (not negative). request_id: this engine's name for the work. cache_salt: whose
        cached prefixes may spare the computing. Returns only when the receiver has every byte.

        Raises InvalidRequest (what was asked is not what was reserved: the reservation lives on), LeaseError (refused,
        expired), TransferFailed (receiver gone or silent), or what the engine raises. On every failure but the first,
        cancellation too, the receiver is told once no put runs any more, so it does not wait.
        """
        descriptor = self._checked(SendRange(prompt, begin, end, recv_rank), kv_addr_info)
        if self._closed:
            raise EngineUnavailable("this engine is stopping")
        if begin == end:
            return RemoteSendResult(0, 0, 0, 0, 0.0, 0.0, 0.0)
        # A task of its own: a caller's repeated cancellations (anyio's) must not cut the clean-up short.
        task = asyncio.create_task(self._hand_off(descriptor, tuple(prompt), end, request_id, cache_salt))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise

    async def close(self) -> None:
        """Cancel what runs, wait until the receivers know. Before the transport is closed. Idempotent."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._threads.shutdown(wait=False)  # a stopped receiver may keep one until its timeout

    def _checked(self, wanted: SendRange, kv_addr_info: str) -> KVDescriptor:
        if not 0 <= wanted.end <= len(wanted.prompt):
            raise InvalidRequest(
                f"end is {wanted.end}, the prompt has {len(wanted.prompt)} tokens", param="end"
            )
        if not 0 <= wanted.begin <= wanted.end:
            raise InvalidRequest(f"begin is {wanted.begin}, outside [0, {wanted.end}]", param="begin")
        descriptor = decode_descriptor(kv_addr_info, self._secret)
        check_descriptor(
            descriptor, wanted, layout=self._layout, model_hash=self._model_hash, now=self._wall()
        )
        return descriptor

    async def _hand_off(
        self,
        descriptor: KVDescriptor,
        prompt: tuple[int, ...],
        end: int,
        request_id: str,
        cache_salt: str,
    ) -> RemoteSendResult:
        asked_ns = self._now_ns()
        connection = await self._connect(descriptor.engine_id, descriptor.epoch)
        pool = connection.pool
        check_slots_fit(descriptor, pool.total_pages * self._layout.page_size)
        write = _Write(connection, descriptor, self._timeout_s)
        try:
            guard = await write.begin()
            granted_ns = self._now_ns()
            self._check_pool(pool)  # only now, so that the receiver is told
            job = SendJob(
                request_id=request_id,
                prompt_token_ids=prompt,
                begin=descriptor.begin,
                end=end,
                pool=pool,
                # With the mapping's identity: after a reconnect the same engine is mapped a second time.
                destination=f"{descriptor.engine_id}@{descriptor.epoch}#{id(pool):x}",
                slots=slots_from_segments(descriptor.segments),
                guard=guard,
                cache_salt=cache_salt,
            )
            done = await write.during(self._engine.send(job))
            put_ns = self._now_ns()
            await write.finish()
        finally:
            write.give_up()
        return _result(done, granted_ns - asked_ns + self._now_ns() - put_ns)

    async def _connect(self, engine_id: str, epoch: str) -> Connection:
        """The link to a receiver. All who want one wait for the same attempt: a stopped receiver costs one thread."""
        key = (engine_id, epoch)
        connecting = self._connecting.get(key)
        if connecting is None:
            connecting = asyncio.get_running_loop().run_in_executor(
                self._threads, self._transport.connect, engine_id, epoch, self._timeout_s
            )
            self._connecting[key] = connecting
            connecting.add_done_callback(lambda _: self._connecting.pop(key))
        return await asyncio.shield(connecting)

    def _check_pool(self, pool: RemotePool) -> None:
        """Raises TransferFailed."""
        if pool.memory.nbytes != pool.total_pages * self._layout.bytes_per_page:
            raise TransferFailed(
                f"the receiver's {pool.total_pages} KV pages have {pool.memory.nbytes} bytes,"
                f" {self._layout.bytes_per_page} each were expected"
            )


class _Write:
    """One lease's write as the receiver sees it: begun, then finished or given up. Used from one event loop."""

    def __init__(self, connection: Connection, descriptor: KVDescriptor, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._lease = Lease(
            descriptor.engine_id, descriptor.epoch, descriptor.request_id, descriptor.lease_id
        )
        self._loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[MicroservingError] = self._loop.create_future()
        self._open = False  # the receiver was asked, and not told yet that it ended

    async def begin(self) -> LeaseGuard:
        """Get the grant. Raises LeaseError, TransferFailed."""
        self._open = True
        try:
            return await self._answer(self._connection.begin(self._lease, self._on_stop))
        except LeaseError:
            self._open = False
            raise

    async def during(self, work: Awaitable[_T]) -> _T:
        """Do ``work``, but cancel it when the lease ends or the receiver is gone, and raise that error.

        When this ends, so has ``work``, even if that takes time.
        """
        task = asyncio.ensure_future(work)
        try:
            both: set[asyncio.Future[Any]] = {task, self._stop}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._stop.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await _ended(task)

    async def finish(self) -> None:
        """Every byte is in place. Raises LeaseError, TransferFailed."""
        self._open = False
        await self._answer(self._connection.finish(self._lease, True))

    def give_up(self) -> None:
        """We stopped writing, unless that was said. Waits for nothing: a receiver that is stopped hears it later."""
        if self._open:
            self._open = False
            self._connection.finish(self._lease, False)

    async def _answer(self, answer: Future[_T]) -> _T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise TransferFailed(
                f"the receiving engine did not answer within {self._timeout_s:g} s"
            ) from None

    def _on_stop(self, why: MicroservingError) -> None:
        """Any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody writes any more
            self._loop.call_soon_threadsafe(self._stopped, why)

    def _stopped(self, why: MicroservingError) -> None:
        if not self._stop.done():
            self._stop.set_result(why)


async def _ended(future: asyncio.Future[_T]) -> None:
    """Wait for the end of ``future`` whatever comes; then raise the cancellation that came, if one did."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    failure = None if future.cancelled() else future.exception()
    if cancelled is not None:
        if failure is not None:
            _log.info("failed while it was cancelled: %s", failure)
        raise cancelled


def _result(done: SendDone, handshakes_ns: int) -> RemoteSendResult:
    layers = [step.layers for step in done.steps if step.layers is not None]
    put_ns = sum(int((times.put_end - times.put_begin).sum()) for times in layers)
    origin = int(layers[0].put_begin.min()) if layers else 0
    return RemoteSendResult(
        tokens_computed=done.tokens_computed,
        tokens_sent=done.tokens_sent,
        bytes_sent=done.bytes_sent,
        prefix_matched_length=done.prefix_matched_length,
        prefill_ms=_prefill_ns(done.steps) / 1e6,
        transfer_ms=put_ns / 1e6,
        exposed_ms=(put_ns + handshakes_ns) / 1e6,
        layer_times_ns=tuple(
            tuple(
                (int(begin) - origin, int(put) - origin, int(computed) - origin)
                for begin, put, computed in zip(times.put_begin, times.put_end, times.layer_end, strict=True)
            )
            for times in layers
        ),
    )


def _prefill_ns(steps: Sequence[StepTimes]) -> int:
    if not steps:
        return 0
    last = steps[-1]
    end_ns = last.end_ns if last.layers is None else int(last.layers.layer_end[-1])
    return end_ns - steps[0].begin_ns
