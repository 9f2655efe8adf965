"""`remote_send` and the descriptors: what is refused before anything moves, and who is told when something fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from microserving.engine.handoff import EngineIdentity, HandoffReceiver, HandoffSender
from microserving.engine.jobs import Reservation, SendDone, SendJob, StepTimes
from microserving.engine.runner import LayerTimes
from microserving.errors import (
    ConfigError,
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    LeaseError,
    TransferFailed,
)
from microserving.protocol.generation import RemoteSendResult
from microserving.protocol.kv_descriptor import decode_descriptor, encode_descriptor
from microserving.protocol.kv_layout import KVLayout
from microserving.transports import Connection, Lease, LeaseObserver
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


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.sending.close()
    made.receiving.close()


def test_the_descriptor_says_what_was_reserved(setup: Setup) -> None:
    descriptor = decode_descriptor(setup.descriptor(), SECRET)
    assert descriptor.segments == (2, 82, 14, 32, 24)
    assert descriptor.begin == 2
    assert descriptor.nbytes == 38 * 64
    assert descriptor.expires_at == NOW + 30
    assert (descriptor.engine_id, descriptor.epoch, descriptor.rank) == ("d0", "e1", 0)
    assert (descriptor.request_id, descriptor.lease_id) == ("r1", 9)
    assert (descriptor.layout_hash, descriptor.model_hash) == (LAYOUT.hash, "m1")


def test_a_send_puts_exactly_the_reserved_slots_and_reports_its_times(setup: Setup) -> None:
    result = setup.send()
    assert setup.memory is not None
    rows = setup.memory.reshape(PAGES * 16, -1).all(axis=1)
    assert np.flatnonzero(rows).tolist() == [*range(32, 56), *range(82, 96)]
    assert setup.observer.events == [("begin", 9), ("end", 9, True)]
    (job,) = setup.engine.jobs
    assert job.prompt_token_ids == tuple(PROMPT)
    assert (job.request_id, job.begin, job.end) == ("p-1", 2, 40)
    assert job.slots.tolist() == [*range(82, 96), *range(32, 56)]
    assert (result.tokens_computed, result.tokens_sent, result.bytes_sent) == (40, 38, 38 * 64)
    assert result.prefix_matched_length == 0
    assert result.prefill_ms == 100.0  # 500 .. 600
    assert result.transfer_ms == 10.0  # 1 + 2 + 3 + 4
    assert result.exposed_ms == 17.0  # and hand-shakes of 3 and 4
    assert result.layer_times_ns == (
        ((0, 1 * MS, 10 * MS), (20 * MS, 22 * MS, 30 * MS)),
        ((50 * MS, 53 * MS, 60 * MS), (70 * MS, 74 * MS, 80 * MS)),
    )


def test_jobs_to_one_receiver_share_destination_and_pool(setup: Setup) -> None:
    async def main() -> None:
        sender = setup.sender(monotonic_ns=lambda: 0)
        await setup._send(sender)
        setup.sending.connect("d0", "e1", 1).close()
        await asyncio.gather(
            setup._send(sender), setup._send(sender, kv_addr_info=setup.descriptor(lease_id=10))
        )
        await sender.close()

    asyncio.run(main())
    before, one, two = setup.engine.jobs
    assert one.destination == two.destination
    assert one.pool is two.pool
    assert before.pool is not one.pool
    assert before.destination != one.destination  # never two mappings in one step


@pytest.mark.case("PD-26")
def test_nothing_to_send_is_done_at_once(setup: Setup) -> None:
    result = setup.send(begin=7, end=7, kv_addr_info=setup.descriptor(7, 7))
    assert result == RemoteSendResult(0, 0, 0, 0, 0.0, 0.0, 0.0)
    assert setup.engine.jobs == []
    assert setup.observer.events == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"end": 51}, "end"),
        ({"end": -1}, "end"),
        ({"begin": -1}, "begin"),
        ({"begin": 41}, "begin"),
        ({"end": 39}, "end"),
        ({"begin": 3}, "begin"),
        ({"recv_rank": 1}, "recv_rank"),
        ({"prompt": [PROMPT[0] + 1, *PROMPT[1:]]}, "prompt"),
        ({"kv_addr_info": "garbage"}, "kv_addr_info"),
        ({"kv_addr_info": ""}, "kv_addr_info"),
    ],
)
def test_bad_requests_touch_nothing(setup: Setup, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        setup.send(**changes)
    assert caught.value.param == param
    assert setup.engine.jobs == []
    assert setup.observer.events == []


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"layout_hash": "other"}, InvalidRequest, f"{LAYOUT.hash} here, other there"),
        ({"model_hash": "m2"}, InvalidRequest, "m1 here, m2 there"),
        ({"nbytes": 64}, InvalidRequest, "64 bytes for 38 slots"),
        ({"expires_at": NOW}, LeaseError, "expired"),
        ({"segments": (1, 91, 38)}, InvalidRequest, "slot 128, the receiver's pool has 128"),
        ({"segments": (1, 2**31 - 40, 38)}, InvalidRequest, "the receiver's pool has 128"),
        ({"epoch": "e0"}, TransferFailed, "cannot be reached"),
        ({"engine_id": "nobody"}, TransferFailed, "cannot be reached"),
    ],
)
def test_bad_descriptors_touch_nothing(
    setup: Setup, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        setup.send(kv_addr_info=setup.descriptor(**changes))
    assert setup.engine.jobs == []
    assert setup.observer.events == []


def test_an_unsigned_descriptor_is_refused(setup: Setup) -> None:
    unsigned = encode_descriptor(decode_descriptor(setup.descriptor(), SECRET), None)
    with pytest.raises(InvalidRequest, match="not signed"):
        setup.send(kv_addr_info=unsigned)


@pytest.mark.case("PD-24")
def test_a_pool_of_another_geometry_is_refused(setup: Setup) -> None:
    other = FakeTransport(network=setup.network)
    other.allocate(PAGES * LAYOUT.bytes_per_page * 2)
    other.serve("d0", "e2", PAGES, setup.observer)
    with pytest.raises(TransferFailed, match="8 KV pages have 16384 bytes, 1024 each were expected"):
        setup.send(kv_addr_info=setup.descriptor(epoch="e2"))
    assert setup.engine.jobs == []
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]
    other.close()


@pytest.mark.case("PD-03")
def test_a_refused_begin_computes_nothing(setup: Setup) -> None:
    setup.observer.grant = False
    with pytest.raises(LeaseError):
        setup.send()
    assert setup.engine.jobs == []
    assert setup.observer.events == [("begin", 9)]


@pytest.mark.case("PD-03")
def test_a_lease_that_ended_while_the_engine_computed(setup: Setup) -> None:
    setup.observer.keep = False
    with pytest.raises(LeaseError):
        setup.send()
    assert setup.observer.events == [("begin", 9), ("end", 9, True)]


def test_the_receiver_decides_whether_a_lease_lives_on(setup: Setup) -> None:
    async def later(_: SendJob) -> None:
        setup.wall += 3600  # renewed at the receiver, of which the descriptor knows nothing

    setup.engine.before = later
    assert setup.send().tokens_sent == 38


@pytest.mark.case("PD-05")
@pytest.mark.parametrize("error", [EngineUnavailable("stopped"), InternalError("bug"), ValueError("worse")])
def test_when_the_engine_fails_the_receiver_is_told(setup: Setup, error: Exception) -> None:
    async def fail(_: SendJob) -> None:
        raise error

    setup.engine.before = fail
    with pytest.raises(type(error)):
        setup.send()
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


@pytest.mark.case("PD-42")
def test_a_lost_finish_is_a_failure(setup: Setup) -> None:
    setup.network.fail_finish = True
    with pytest.raises(TransferFailed):
        setup.send()
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


def test_a_receiver_that_dies_ends_the_computation(setup: Setup) -> None:
    async def die(_: SendJob) -> None:
        setup.receiving.vanish()
        await asyncio.Event().wait()  # a prefill without end

    setup.engine.before = die
    with pytest.raises(TransferFailed, match="gone"):
        setup.send()
    assert setup.engine.stopped == 1
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


def test_a_receiver_that_died_before_the_finish(setup: Setup) -> None:
    async def die(_: SendJob) -> None:
        setup.receiving.vanish()

    setup.engine.before = die
    with pytest.raises(TransferFailed, match="gone"):
        setup.send()


# ------------------------------------------------------------------------------------------------------ cancellation


def test_cancelled_while_computing(setup: Setup) -> None:
    """The receiver is told after the engine has stopped, and not before."""
    order: list[str] = []

    async def main() -> None:
        computing, release = asyncio.Event(), asyncio.Event()

        async def before(_: SendJob) -> None:
            computing.set()
            try:
                await asyncio.Event().wait()
            finally:
                await release.wait()  # the last put takes its time
                order.append(f"stopped, told {len(setup.observer.events) - 1}")

        setup.engine.before = before
        sender = setup.sender()
        task = asyncio.create_task(setup._send(sender))
        await computing.wait()
        for _ in range(3):  # anyio cancels again and again
            task.cancel()
            await asyncio.wait([task], timeout=0.01)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sender.close()

    asyncio.run(main())
    assert order == ["stopped, told 0"]
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


@pytest.mark.parametrize("stage", ["begin", "end"])
def test_cancelled_while_a_receiver_is_silent(setup: Setup, stage: str) -> None:
    """Nobody waits for a stopped receiver; it hears of the ending when it goes on."""

    async def main() -> None:
        silent = asyncio.Event()

        def fall_silent() -> None:
            setup.network.silent = True
            silent.set()

        async def before(_: SendJob) -> None:
            fall_silent()

        if stage == "begin":
            fall_silent()
        setup.engine.before = before
        sender = setup.sender()
        task = asyncio.create_task(setup._send(sender))
        await silent.wait()
        while not setup.network._held:  # noqa: ASYNC110 - what was sent to nobody has no event
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sender.close()
        setup.network.resume()

    asyncio.run(main())
    assert setup.observer.events == [("begin", 9), ("end", 9, stage == "end")]
    assert len(setup.engine.jobs) == (stage == "end")


@pytest.mark.parametrize("stage", ["begin", "end"])
def test_a_silent_receiver_costs_the_timeout(setup: Setup, stage: str) -> None:
    async def fall_silent(_: SendJob) -> None:
        setup.network.silent = True

    async def main() -> None:
        setup.engine.before = fall_silent
        setup.network.silent = stage == "begin"
        sender = setup.sender(timeout_s=0.05)
        with pytest.raises(TransferFailed, match=r"did not answer within 0\.05 s"):
            await setup._send(sender)
        setup.network.resume()
        await sender.close()

    asyncio.run(main())
    assert setup.observer.events == [("begin", 9), ("end", 9, stage == "end")]


@pytest.mark.case("PD-40")
def test_receivers_that_are_stopped_do_not_keep_others_waiting(setup: Setup) -> None:
    """However many sends wait for the link to a stopped receiver, one thread does."""
    stopped, release = setup._receiver(setup.observer, "stopped"), threading.Event()
    connect = setup.sending.connect
    asked: list[str] = []

    def slow(engine_id: str, epoch: str, timeout_s: float) -> Connection:
        asked.append(epoch)
        if epoch == "stopped":
            assert release.wait(10)
        return connect(engine_id, epoch, timeout_s)

    setup.sending.connect = slow  # type: ignore[method-assign]

    async def main() -> None:
        sender = setup.sender(monotonic_ns=lambda: 0)
        waiting = [
            asyncio.create_task(
                setup._send(sender, kv_addr_info=setup.descriptor(epoch="stopped", lease_id=number))
            )
            for number in range(100, 300)
        ]
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            assert (await setup._send(sender)).tokens_sent == 38
        assert asked == ["stopped", "e1"]
        for task in waiting[1:]:
            task.cancel()
        await asyncio.wait(waiting[1:], timeout=5)
        assert all(task.cancelled() for task in waiting[1:])  # at once
        release.set()
        assert (await waiting[0]).tokens_sent == 38
        await sender.close()

    asyncio.run(main())
    stopped.close()


@pytest.mark.case("PD-03")
def test_a_revoked_lease_ends_the_computation(setup: Setup) -> None:
    async def revoke(_: SendJob) -> None:
        setup.receiving.revoke(9)
        await asyncio.Event().wait()  # a prefill without end

    setup.engine.before = revoke
    with pytest.raises(LeaseError, match="ended"):
        setup.send()
    assert setup.engine.stopped == 1
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


def test_a_second_send_into_a_lease_does_not_end_the_first(setup: Setup) -> None:
    async def main() -> None:
        computing, go_on = asyncio.Event(), asyncio.Event()

        async def before(_: SendJob) -> None:
            computing.set()
            await go_on.wait()

        setup.engine.before = before
        sender = setup.sender(monotonic_ns=lambda: 0)
        first = asyncio.create_task(setup._send(sender))
        await computing.wait()
        with pytest.raises(LeaseError, match="being written already"):
            await setup._send(sender)
        go_on.set()
        assert (await first).tokens_sent == 38
        await sender.close()

    asyncio.run(main())
    assert setup.observer.events == [("begin", 9), ("end", 9, True)]


def test_closing_ends_what_runs_and_takes_nothing_more(setup: Setup) -> None:
    async def main() -> None:
        computing = asyncio.Event()

        async def before(_: SendJob) -> None:
            computing.set()
            await asyncio.Event().wait()

        setup.engine.before = before
        sender = setup.sender()
        task = asyncio.create_task(setup._send(sender))
        await computing.wait()
        await sender.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sender.close()
        with pytest.raises(EngineUnavailable):
            await setup._send(sender)

    asyncio.run(main())
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


def test_a_short_secret_is_refused(setup: Setup) -> None:
    with pytest.raises(ConfigError):
        setup.sender(secret=b"short")
    with pytest.raises(ConfigError):
        HandoffReceiver(EngineIdentity("d0", "e1", 0), LAYOUT, "m1", b"short")
