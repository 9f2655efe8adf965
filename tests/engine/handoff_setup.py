"""A sender of KV over a fake network: its receiver's books are recorded, its engine writes ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from microserving.engine.handoff import EngineIdentity, HandoffReceiver, HandoffSender
from microserving.engine.jobs import Reservation, SendDone, SendJob, StepTimes
from microserving.engine.runner import LayerTimes
from microserving.protocol.generation import RemoteSendResult
from microserving.protocol.kv_descriptor import decode_descriptor, encode_descriptor
from microserving.protocol.kv_layout import KVLayout
from microserving.transports import Lease, LeaseObserver
from microserving.transports.fake import FakeNetwork, FakeTransport

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=8, page_size=16, dtype="float16")  # 64 bytes a token
PAGES = 8
SECRET = b"a secret of the cluster"
NOW = 1_000_000.0
PROMPT = list(range(100, 150))


@dataclass
class Observer:
    """The receiver's bookkeeping, recorded: ("begin", lease id) and ("end", lease id, ok)."""

    grant: bool = True
    keep: bool = True
    events: list[tuple[object, ...]] = field(default_factory=list)

    def begin_write(self, lease: Lease) -> bool:
        self.events.append(("begin", lease.lease_id))
        return self.grant

    def end_write(self, lease: Lease, ok: bool) -> bool:
        self.events.append(("end", lease.lease_id, ok))
        return ok and self.keep


@dataclass
class StubEngine:
    """Writes 1 into every slot of a job, after ``before`` (a test's hook) has run; reports fixed times."""

    before: Callable[[SendJob], Awaitable[None]] | None = None
    jobs: list[SendJob] = field(default_factory=list)
    stopped: int = 0

    async def send(self, job: SendJob) -> SendDone:
        self.jobs.append(job)
        try:
            if self.before is not None:
                await self.before(job)
        finally:
            self.stopped += 1
        pool = job.pool.memory.reshape(job.pool.total_pages * LAYOUT.page_size, -1)
        pool[job.slots] = 1
        sent = job.end - job.begin
        return SendDone(job.end, 0, sent, sent * LAYOUT.bytes_per_token, STEPS)


def _times(*layers: tuple[int, int, int]) -> LayerTimes:
    columns = np.array(layers, np.int64).T
    return LayerTimes(*columns)


MS = 1_000_000
STEPS = (
    StepTimes(500 * MS, 510 * MS, None),
    StepTimes(510 * MS, 551 * MS, _times((520 * MS, 521 * MS, 530 * MS), (540 * MS, 542 * MS, 550 * MS))),
    StepTimes(560 * MS, 601 * MS, _times((570 * MS, 573 * MS, 580 * MS), (590 * MS, 594 * MS, 600 * MS))),
)


class Setup:
    """A receiver d0 and a sender on a fake network."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.observer = Observer()
        self.receiving = self._receiver(self.observer)
        self.memory = self.receiving._memory
        self.sending = FakeTransport(network=self.network)
        self.engine = StubEngine()
        self.wall = NOW
        self.clock_ns = iter([0, 3 * MS, 100 * MS, 104 * MS])

    def _receiver(self, observer: LeaseObserver, epoch: str = "e1") -> FakeTransport:
        transport = FakeTransport(network=self.network)
        transport.allocate(PAGES * LAYOUT.bytes_per_page)
        transport.serve("d0", epoch, PAGES, observer)
        return transport

    def sender(self, **changes: Any) -> HandoffSender:
        options: dict[str, Any] = {
            "transport": self.sending,
            "engine": self.engine,
            "layout": LAYOUT,
            "model_hash": "m1",
            "secret": SECRET,
            "timeout_s": 5.0,
            "monotonic_ns": lambda: next(self.clock_ns),
            "wall": lambda: self.wall,
        } | changes
        return HandoffSender(**options)

    def descriptor(self, begin: int = 2, end: int = 40, **changes: Any) -> str:
        """Of pages 5, 2, 3 (slots 80.., 32.., 48..), which hold positions 0, 16, 32 and on."""
        slots = np.concatenate([np.arange(80, 96), np.arange(32, 64)]).astype(np.int32)[begin:end]
        receiver = HandoffReceiver(
            EngineIdentity("d0", "e1", 0), LAYOUT, "m1", SECRET, wall=lambda: self.wall
        )
        text = receiver.descriptor(Reservation("r1", 9, tuple(PROMPT), begin, end, slots, 30.0))
        if changes:
            return encode_descriptor(replace(decode_descriptor(text, SECRET), **changes), SECRET)
        return text

    def send(self, **changes: Any) -> RemoteSendResult:
        async def main() -> RemoteSendResult:
            sender = self.sender()
            try:
                return await self._send(sender, **changes)
            finally:
                await sender.close()

        return asyncio.run(main())

    async def _send(self, sender: HandoffSender, **changes: Any) -> RemoteSendResult:
        arguments: dict[str, Any] = {
            "prompt": PROMPT,
            "begin": 2,
            "end": 40,
            "recv_rank": 0,
            "request_id": "p-1",
        } | changes
        arguments.setdefault("kv_addr_info", self.descriptor())
        return await sender.send(**arguments)
