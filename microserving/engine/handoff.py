"""Both ends of a KV hand-off: `prep_recv`'s descriptor at the receiver, all of `remote_send` at the sender.

Owns the order of the steps and who is told what when one fails. Does not know HTTP, how pages are reserved, how the
model runs or how bytes get there: those are the scheduler, the engine and the transport.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from microserving.engine.jobs import Reservation, SendDone, SendJob, StepTimes
from microserving.errors import EngineUnavailable, InvalidRequest, MicroservingError, TransferFailed
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
from microserving.transports.base import Connection, Lease, Transport

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_HANDSHAKES = 64
"""Hand-shakes at once. Each takes well under a millisecond unless its receiver is stopped."""
LIVENESS_INTERVAL_S = 0.25
"""How often a send that computes looks whether its receiver still lives."""


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
        self._threads = ThreadPoolExecutor(MAX_HANDSHAKES, thread_name_prefix="kv-handshake")
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
    ) -> RemoteSendResult:
        """Compute the KV of prompt[begin:end] and put it where ``kv_addr_info`` says.

        begin, end: already resolved (not negative). request_id: this engine's name for the work. Returns only when
        the receiver has every byte. Raises InvalidRequest, LeaseError (refused, expired), TransferFailed (receiver
        gone or silent), or what the engine raises. On every failure, cancellation too, the receiver is told once no
        put runs any more, so it does not wait.
        """
        descriptor = self._checked(SendRange(prompt, begin, end, recv_rank), kv_addr_info)
        if self._closed:
            raise EngineUnavailable("this engine is stopping")
        if begin == end:
            return RemoteSendResult(0, 0, 0, 0, 0.0, 0.0, 0.0)
        # A task of its own: a caller's repeated cancellations (anyio's) must not cut the clean-up short.
        task = asyncio.create_task(self._hand_off(descriptor, tuple(prompt), end, request_id))
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
        self._threads.shutdown(wait=False)  # idle by now

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
        self, descriptor: KVDescriptor, prompt: tuple[int, ...], end: int, request_id: str
    ) -> RemoteSendResult:
        write = _Write(self._transport, self._layout, descriptor, self._timeout_s)
        try:
            asked_ns = self._now_ns()
            connection = await self._in_thread(write.begin)
            granted_ns = self._now_ns()
            pool = connection.pool
            job = SendJob(
                request_id=request_id,
                prompt_token_ids=prompt,
                begin=descriptor.begin,
                end=end,
                pool=pool,
                # With the mapping's identity: after a reconnect the same engine is mapped a second time.
                destination=f"{descriptor.engine_id}@{descriptor.epoch}#{id(pool):x}",
                slots=slots_from_segments(descriptor.segments),
            )
            done = await self._compute(job, connection)
            put_ns = self._now_ns()
            await self._in_thread(write.finish)
            handshakes_ns = granted_ns - asked_ns + self._now_ns() - put_ns
        finally:
            if write.unfinished:
                await self._in_thread(write.give_up)
        return _result(done, end, handshakes_ns)

    async def _compute(self, job: SendJob, connection: Connection) -> SendDone:
        """Let the engine do it; stop it when the receiver dies. No put runs any more when this ends."""
        task = asyncio.create_task(self._engine.send(job))
        try:
            while not (await asyncio.wait([task], timeout=LIVENESS_INTERVAL_S))[0]:
                if not connection.alive:
                    raise TransferFailed("the receiving engine is gone")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await _ended(task)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Run blocking ``work``; when cancelled, wait for its end all the same: what it did must be known."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        await _ended(future)
        return future.result()


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


class _Write:
    """One lease's write as the receiver sees it. Methods block; one at a time."""

    def __init__(
        self, transport: Transport, layout: KVLayout, descriptor: KVDescriptor, timeout_s: float
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._descriptor = descriptor
        self._timeout_s = timeout_s
        self._lease = Lease(
            descriptor.engine_id, descriptor.epoch, descriptor.request_id, descriptor.lease_id
        )
        self._connection: Connection | None = None

    @property
    def unfinished(self) -> bool:
        """Whether the receiver granted the write and was not told yet how it ended."""
        return self._connection is not None

    def begin(self) -> Connection:
        """Connect and get the grant. Raises InvalidRequest, LeaseError, TransferFailed."""
        connection = self._transport.connect(
            self._descriptor.engine_id, self._descriptor.epoch, self._timeout_s
        )
        pool = connection.pool
        if pool.memory.nbytes != pool.total_pages * self._layout.bytes_per_page:
            raise TransferFailed(
                f"the receiver's {pool.total_pages} KV pages have {pool.memory.nbytes} bytes,"
                f" {self._layout.bytes_per_page} each were expected"
            )
        check_slots_fit(self._descriptor, pool.total_pages * self._layout.page_size)
        connection.begin(self._lease, self._timeout_s)
        self._connection = connection
        return connection

    def finish(self) -> None:
        """Every byte is in place. Raises LeaseError, TransferFailed."""
        self._end(True)

    def give_up(self) -> None:
        """We stopped writing. Never raises: a receiver that cannot be told finds out by itself."""
        try:
            self._end(False)
        except MicroservingError as error:
            _log.info("could not tell the receiver that a write ended: %s", error)

    def _end(self, ok: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if not connection.alive:
            raise TransferFailed("the receiving engine is gone")
        connection.finish(self._lease, ok, self._timeout_s)


def _result(done: SendDone, end: int, handshakes_ns: int) -> RemoteSendResult:
    layers = [step.layers for step in done.steps if step.layers is not None]
    put_ns = sum(int((times.put_end - times.put_begin).sum()) for times in layers)
    origin = int(layers[0].put_begin.min()) if layers else 0
    return RemoteSendResult(
        tokens_computed=done.tokens_computed,
        tokens_sent=done.tokens_sent,
        bytes_sent=done.bytes_sent,
        prefix_matched_length=max(0, end - done.tokens_computed),
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
