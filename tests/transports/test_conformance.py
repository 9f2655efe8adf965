"""What every transport does (the contract in transports/base.py). Parametrised over the registry."""

from __future__ import annotations

import json
import queue
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from microserving.errors import ConfigError, LeaseError, MicroservingError, StartupError, TransferFailed
from microserving.transports import TRANSPORTS, Lease, create_transport

from .conformance_harness import (
    PAGE_BYTES,
    PAGES,
    TIMEOUT_S,
    RecordingObserver,
    World,
    lease,
    run_threads,
)


def _note(stops: queue.Queue[tuple[int, MicroservingError]], number: int, why: MicroservingError) -> None:
    stops.put((number, why))


def test_the_registry_makes_every_transport(tmp_path: Path) -> None:
    for name in TRANSPORTS:
        transport = create_transport(name, runtime_dir=tmp_path / "run")
        assert transport.name == name
        transport.close()
    with pytest.raises(ConfigError, match="unknown transport 'pigeon'; there are: fake, shared_memory"):
        create_transport("pigeon")


def test_the_pool_is_zeroed_writable_and_page_aligned(world: World) -> None:
    memory = world.transport().allocate(3 * PAGE_BYTES + 5)
    assert memory.shape == (3 * PAGE_BYTES + 5,)
    assert memory.dtype == np.uint8
    assert memory.ctypes.data % 4096 == 0
    assert not memory.any()
    memory[:] = 7
    assert memory.sum() == 7 * memory.size


def test_the_pool_is_allocated_once_and_has_a_size(world: World) -> None:
    transport = world.transport()
    for nbytes in (0, -1):
        with pytest.raises(StartupError, match=str(nbytes)):
            transport.allocate(nbytes)
    transport.allocate(PAGE_BYTES)
    with pytest.raises(StartupError):
        transport.allocate(PAGE_BYTES)


def test_serving_needs_a_pool_of_whole_pages_and_happens_once(
    world: World, observer: RecordingObserver
) -> None:
    transport = world.transport()
    with pytest.raises(StartupError):
        transport.serve("d0", "e1", 1, observer)
    transport.allocate(PAGE_BYTES)
    for pages in (0, 3):
        with pytest.raises(StartupError, match="whole pages"):
            transport.serve("d0", "e1", pages, observer)
    transport.serve("d0", "e1", 1, observer)
    with pytest.raises(StartupError):
        transport.serve("d0", "e2", 1, observer)


def test_a_second_engine_of_the_same_name_is_refused(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    with pytest.raises(StartupError):
        world.receiver(observer)


def test_what_is_described_is_public(world: World, observer: RecordingObserver) -> None:
    shown = world.receiver(observer).describe()
    assert shown["name"] == world.name
    assert shown["nbytes"] == PAGES * PAGE_BYTES
    assert str(world.runtime_dir) not in json.dumps(dict(shown))


def test_a_put_lands_in_the_receivers_pool(world: World, observer: RecordingObserver) -> None:
    receiver = world.transport()
    own = receiver.allocate(PAGES * PAGE_BYTES)
    receiver.serve("d0", "e1", PAGES, observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    assert connection.pool.total_pages == PAGES
    assert connection.pool.memory.shape == own.shape
    connection.begin(lease()).result(TIMEOUT_S)
    connection.pool.memory[5000:5008] = np.arange(1, 9)
    connection.finish(lease(), True).result(TIMEOUT_S)
    assert observer.events == [("begin", lease()), ("end", lease(), True)]
    assert own[5000:5008].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert own.sum() == 36


def test_pools_may_have_different_sizes(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer, "d0", pages=3)
    sender = world.receiver(RecordingObserver(), "p0", pages=50)
    assert sender.connect("d0", "e1", TIMEOUT_S).pool.total_pages == 3


def test_an_engine_can_send_to_itself(world: World, observer: RecordingObserver) -> None:
    transport = world.receiver(observer)
    connection = transport.connect("d0", "e1", TIMEOUT_S)
    connection.begin(lease()).result(TIMEOUT_S)
    connection.finish(lease(), True).result(TIMEOUT_S)
    assert observer.events[-1] == ("end", lease(), True)


def test_a_refused_begin(world: World, observer: RecordingObserver) -> None:
    observer.grant = False
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    with pytest.raises(LeaseError):
        connection.begin(lease()).result(TIMEOUT_S)
    with pytest.raises(LeaseError):
        connection.finish(lease(), True).result(TIMEOUT_S)
    connection.close()
    assert observer.events == [("begin", lease())]


def test_a_failed_write_is_told(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    connection.begin(lease()).result(TIMEOUT_S)
    connection.finish(lease(), False).result(TIMEOUT_S)
    assert observer.events[-1] == ("end", lease(), False)


@pytest.mark.case("PD-03")
def test_a_finish_after_the_lease_ended_is_an_error(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    connection.begin(lease()).result(TIMEOUT_S)
    observer.keep = False
    with pytest.raises(LeaseError):
        connection.finish(lease(), True).result(TIMEOUT_S)
    assert observer.events == [("begin", lease()), ("end", lease(), True)]


@pytest.mark.case("PD-03")
def test_the_writer_of_a_revoked_lease_is_told_once_and_still_has_to_finish(
    world: World, observer: RecordingObserver
) -> None:
    receiver = world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    stops: queue.Queue[tuple[int, MicroservingError]] = queue.Queue()
    for number in (1, 2):
        connection.begin(lease(number), partial(_note, stops, number)).result(TIMEOUT_S)
    for number in (1, 1, 7):  # 7: nobody writes it
        receiver.revoke(number)
    number, why = stops.get(timeout=TIMEOUT_S)
    assert (number, type(why)) == (1, LeaseError)
    connection.finish(lease(2), True).result(TIMEOUT_S)  # behind all that was sent before
    assert stops.empty()
    assert ("end", lease(1), False) not in observer.events
    assert connection.alive
    connection.finish(lease(1), False).result(TIMEOUT_S)
    assert observer.events[-1] == ("end", lease(1), False)


def test_a_lease_that_was_finished_is_not_revoked(world: World, observer: RecordingObserver) -> None:
    receiver = world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    stops: queue.Queue[MicroservingError] = queue.Queue()
    connection.begin(lease(), stops.put).result(TIMEOUT_S)
    connection.finish(lease(), True).result(TIMEOUT_S)
    receiver.revoke(1)
    connection.begin(lease(2)).result(TIMEOUT_S)
    assert stops.empty()


def test_a_writer_is_told_when_its_receiver_goes(world: World, observer: RecordingObserver) -> None:
    receiver = world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    stops: queue.Queue[MicroservingError] = queue.Queue()
    connection.begin(lease(), stops.put).result(TIMEOUT_S)
    receiver.close()
    assert isinstance(stops.get(timeout=TIMEOUT_S), TransferFailed)


def test_a_begin_is_withdrawn_without_waiting_for_its_answer(
    world: World, observer: RecordingObserver
) -> None:
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    connection.begin(lease())
    connection.finish(lease(), False).result(TIMEOUT_S)
    assert observer.events == [("begin", lease()), ("end", lease(), False)]


def test_finish_needs_a_begin_and_counts_once(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    with pytest.raises(LeaseError):
        connection.finish(lease(), True).result(TIMEOUT_S)
    connection.begin(lease()).result(TIMEOUT_S)
    connection.finish(lease(), True).result(TIMEOUT_S)
    with pytest.raises(LeaseError):
        connection.finish(lease(), True).result(TIMEOUT_S)
    connection.close()
    assert observer.events == [("begin", lease()), ("end", lease(), True)]


def test_a_lease_is_begun_once(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    connection.begin(lease()).result(TIMEOUT_S)
    with pytest.raises(LeaseError):
        connection.begin(lease()).result(TIMEOUT_S)
    connection.finish(lease(), True).result(TIMEOUT_S)
    assert observer.events == [("begin", lease()), ("end", lease(), True)]


def test_one_writer_cannot_finish_the_lease_of_another(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    writer = world.transport().connect("d0", "e1", TIMEOUT_S)
    other = world.transport().connect("d0", "e1", TIMEOUT_S)
    writer.begin(lease()).result(TIMEOUT_S)
    with pytest.raises(LeaseError):
        other.finish(lease(), True).result(TIMEOUT_S)
    assert observer.events == [("begin", lease())]


def test_a_lease_of_another_epoch_is_refused(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    for wrong in (lease(epoch="e0"), lease(engine_id="d1")):
        with pytest.raises(LeaseError):
            connection.begin(wrong).result(TIMEOUT_S)
    assert observer.events == []


def test_closing_ends_the_unfinished_leases_only(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    for number in (1, 2, 3):
        connection.begin(lease(number)).result(TIMEOUT_S)
    connection.finish(lease(2), True).result(TIMEOUT_S)
    connection.close()
    connection.close()
    observer.wait_for("end", lease(1), False)
    observer.wait_for("end", lease(3), False)
    assert ("end", lease(2), False) not in observer.events
    assert not connection.alive
    with pytest.raises(TransferFailed):
        connection.begin(lease(4)).result(TIMEOUT_S)


def test_a_closed_sender_ends_its_leases_and_no_others(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    leaving, staying = world.transport(), world.transport()
    leaving.connect("d0", "e1", TIMEOUT_S).begin(lease(1)).result(TIMEOUT_S)
    stays = staying.connect("d0", "e1", TIMEOUT_S)
    stays.begin(lease(2)).result(TIMEOUT_S)
    leaving.close()
    leaving.close()
    observer.wait_for("end", lease(1), False)
    stays.finish(lease(2), True).result(TIMEOUT_S)
    with pytest.raises(TransferFailed):
        leaving.connect("d0", "e1", TIMEOUT_S)


def test_links_are_shared_and_replaced_when_closed(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    sender = world.transport()
    first = sender.connect("d0", "e1", TIMEOUT_S)
    assert sender.connect("d0", "e1", TIMEOUT_S) is first
    first.close()
    second = sender.connect("d0", "e1", TIMEOUT_S)
    assert second is not first
    second.begin(lease()).result(TIMEOUT_S)


@pytest.mark.parametrize(
    ("engine_id", "epoch"), [("nobody", "e1"), ("d0", "e0"), ("x" * 128, "y" * 64), ("../d0", "")]
)
def test_unknown_receivers(world: World, observer: RecordingObserver, engine_id: str, epoch: str) -> None:
    world.receiver(observer)
    with pytest.raises(TransferFailed) as caught:
        world.transport().connect(engine_id, epoch, TIMEOUT_S)
    assert str(world.runtime_dir) not in caught.value.message


def test_a_closed_receiver(world: World, observer: RecordingObserver) -> None:
    receiver = world.receiver(observer)
    sender = world.transport()
    connection = sender.connect("d0", "e1", TIMEOUT_S)
    connection.begin(lease()).result(TIMEOUT_S)
    pool = connection.pool
    receiver.close()
    receiver.close()
    observer.wait_for("end", lease(), False)
    assert not connection.alive
    with pytest.raises(TransferFailed):
        connection.finish(lease(), True).result(TIMEOUT_S)
    with pytest.raises(TransferFailed):
        connection.begin(lease(2)).result(TIMEOUT_S)
    with pytest.raises(TransferFailed):
        sender.connect("d0", "e1", TIMEOUT_S)
    pool.memory[:] = 1  # a put that runs while the receiver goes must not crash
    assert pool.memory.sum() == PAGES * PAGE_BYTES


@pytest.mark.case("PD-18")
def test_a_restarted_receiver_is_another_epoch(world: World, observer: RecordingObserver) -> None:
    old = world.receiver(observer, epoch="e1")
    sender = world.transport()
    before = sender.connect("d0", "e1", TIMEOUT_S)
    old.close()
    again = RecordingObserver()
    world.receiver(again, epoch="e2")
    after = sender.connect("d0", "e2", TIMEOUT_S)
    after.begin(lease(epoch="e2")).result(TIMEOUT_S)
    after.finish(lease(epoch="e2"), True).result(TIMEOUT_S)
    assert again.events[-1] == ("end", lease(epoch="e2"), True)
    assert not before.alive
    with pytest.raises(TransferFailed):
        sender.connect("d0", "e1", TIMEOUT_S)
    assert sender.connect("d0", "e2", TIMEOUT_S) is after


def test_a_newer_epoch_takes_the_place_once_the_writes_in_flight_are_done(
    world: World, observer: RecordingObserver
) -> None:
    world.receiver(observer, epoch="e1")
    world.receiver(RecordingObserver(), epoch="e2")
    sender = world.transport()
    old = sender.connect("d0", "e1", TIMEOUT_S)
    old.begin(lease()).result(TIMEOUT_S)
    sender.connect("d0", "e2", TIMEOUT_S)
    assert old.alive
    old.finish(lease(), True).result(TIMEOUT_S)
    assert not old.alive
    assert observer.events == [("begin", lease()), ("end", lease(), True)]


def test_many_threads_on_one_link(world: World, observer: RecordingObserver) -> None:
    world.receiver(observer)
    sender = world.transport()

    def work(thread: int) -> None:
        for i in range(25):
            mine = lease(1 + thread * 100 + i)
            connection = sender.connect("d0", "e1", TIMEOUT_S)
            connection.begin(mine).result(TIMEOUT_S)
            connection.finish(mine, i % 3 > 0).result(TIMEOUT_S)

    assert run_threads(8, work) == []
    ends = [event for event in observer.events if event[0] == "end"]
    assert len(ends) == len(set(ends)) == 200
    for _, ended, ok in ends:
        assert isinstance(ended, Lease)
        assert ok is ((ended.lease_id - 1) % 100 % 3 > 0)
