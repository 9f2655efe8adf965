"""Shared memory between real processes: kills, stops, restarts."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from microserving.errors import MicroservingError, TransferFailed
from microserving.transports.shared_memory import SharedMemoryTransport, sockets

from .conformance_harness import PAGE_BYTES, PAGES, TIMEOUT_S, RecordingObserver, World, lease


class Peer:
    """A peer_process.py."""

    def __init__(self, *arguments: object) -> None:
        script = Path(__file__).with_name("peer_process.py")
        command = [sys.executable, str(script), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == line

    def lines_until(self, last: str) -> list[str]:
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line.strip())
            if lines[-1] == last:
                return lines
        raise AssertionError(f"the peer ended without {last!r}")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread of it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Peers:
    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._all: list[Peer] = []

    def receiver(self, engine_id: str = "d0", epoch: str = "e1", *more: object) -> Peer:
        peer = Peer("receiver", self._runtime_dir, engine_id, epoch, PAGES, *more)
        self._all.append(peer)
        peer.expect("ready")
        return peer

    def writer(self, engine_id: str = "d0", epoch: str = "e1") -> Peer:
        peer = Peer("writer", self._runtime_dir, engine_id, epoch)
        self._all.append(peer)
        peer.expect("begun")
        return peer

    def close(self) -> None:
        for peer in self._all:
            peer.kill()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World("shared_memory", tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path / "run")
    yield made
    made.close()


def test_bytes_cross_between_processes(world: World, peers: Peers) -> None:
    receiver = peers.receiver()
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    connection.begin(lease()).result(TIMEOUT_S)
    connection.pool.memory[100:110] = 9
    connection.finish(lease(), True).result(TIMEOUT_S)
    receiver.expect("begin 1")
    receiver.expect("end 1 True")
    receiver.tell("sum")
    receiver.expect("sum 90")


def test_a_killed_writer_ends_its_lease_within_a_second(world: World, peers: Peers) -> None:
    observer = RecordingObserver()
    world.receiver(observer)
    writer, other = peers.writer(), world.transport().connect("d0", "e1", TIMEOUT_S)
    other.begin(lease(2)).result(TIMEOUT_S)
    writer.kill()
    observer.wait_for("end", lease(), False)
    other.finish(lease(2), True).result(TIMEOUT_S)
    assert ("end", lease(2), True) in observer.events


@pytest.mark.case("PD-40")
def test_a_stopped_writer_keeps_its_lease_and_stops_nobody(world: World, peers: Peers) -> None:
    observer = RecordingObserver()
    memory = world.transport().allocate(PAGES * PAGE_BYTES)
    world.transports[-1].serve("d0", "e1", PAGES, observer)
    writer = peers.writer()
    writer.stop()
    other = world.transport().connect("d0", "e1", TIMEOUT_S)
    started = time.monotonic()
    for number in range(2, 52):
        other.begin(lease(number)).result(TIMEOUT_S)
        other.finish(lease(number), True).result(TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S  # nothing waited for who does not answer
    assert not [event for event in observer.events if event[:2] == ("end", lease())]
    writer.resume()
    writer.tell("finish")
    writer.expect("finished")
    assert ("end", lease(), True) in observer.events
    assert memory[0] == 42


@pytest.mark.case("PD-03")
@pytest.mark.case("PD-40")
def test_a_stopped_writer_whose_lease_ended_puts_nothing_when_it_wakes(world: World, peers: Peers) -> None:
    """The pages belong to others by then; it learns so from the lease word, before it reads any message."""
    observer = RecordingObserver()
    receiver = world.transport()
    memory = receiver.allocate(PAGES * PAGE_BYTES)
    receiver.serve("d0", "e1", PAGES, observer)
    writer = peers.writer()
    writer.tell("put 1")
    writer.expect("put True")
    writer.stop()
    receiver.revoke(1)
    other = world.transport().connect("d0", "e1", TIMEOUT_S)
    guard = other.begin(lease(2)).result(TIMEOUT_S)  # takes the very word
    assert other.pool.leases[guard.word] == 2
    memory[:] = 7
    writer.tell("put 2")
    writer.resume()
    writer.expect("put False")
    assert (memory == 7).all()
    assert not [
        event for event in observer.events if event[:2] == ("end", lease())
    ]  # it has not said that it stopped
    writer.kill()
    observer.wait_for("end", lease(), False)
    assert other.pool.leases[guard.word] == 2


@pytest.mark.case("PD-18")
def test_nothing_written_through_an_old_mapping_reaches_a_restarted_receiver(
    world: World, peers: Peers
) -> None:
    """SIGKILL in the middle of a write clears no word: the mapping goes on to say yes, to memory that nobody owns."""
    before = peers.receiver("d0", "e1")
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    guard = connection.begin(lease()).result(TIMEOUT_S)
    pool = connection.pool
    before.kill()
    after = peers.receiver("d0", "e2")
    assert pool.leases[guard.word] == guard.lease_id
    pool.memory[:] = 9
    pool.leases[:] = 9
    after.tell("sum")
    after.expect("sum 0")
    again = world.transport().connect("d0", "e2", TIMEOUT_S)
    granted = again.begin(lease(epoch="e2")).result(TIMEOUT_S)
    assert again.pool.leases[granted.word] == granted.lease_id
    assert not again.pool.memory.any()


def test_a_killed_receiver_is_noticed_at_once(world: World, peers: Peers) -> None:
    receiver = peers.receiver()
    sender = world.transport()
    connection = sender.connect("d0", "e1", TIMEOUT_S)
    connection.begin(lease()).result(TIMEOUT_S)
    pool = connection.pool
    receiver.kill()
    assert not connection.alive
    started = time.monotonic()
    with pytest.raises(TransferFailed, match="gone"):
        connection.finish(lease(), True).result(TIMEOUT_S)
    with pytest.raises(TransferFailed):
        sender.connect("d0", "e1", TIMEOUT_S)
    assert time.monotonic() - started < TIMEOUT_S  # nothing waited for who does not answer
    pool.memory[:] = 1  # a put in the middle of it all
    assert pool.memory.sum() == PAGES * PAGE_BYTES


@pytest.mark.case("PD-40")
def test_a_stopped_receiver_costs_its_own_writers_their_timeout_only(world: World, peers: Peers) -> None:
    stopped, running = peers.receiver("d0"), peers.receiver("d1")
    sender = world.transport()
    connection = sender.connect("d0", "e1", TIMEOUT_S)
    stopped.stop()
    unanswered = connection.begin(lease())
    with pytest.raises(TimeoutError):
        unanswered.result(0.2)
    connection.finish(lease(), False)
    healthy = sender.connect("d1", "e1", TIMEOUT_S)
    healthy.begin(lease(5, "d1")).result(TIMEOUT_S)
    healthy.finish(lease(5, "d1"), True).result(TIMEOUT_S)
    with pytest.raises(TransferFailed):
        world.transport().connect("d0", "e1", 0.2)
    assert connection.alive
    stopped.resume()
    connection.begin(lease(2)).result(TIMEOUT_S)
    stopped.expect("begin 1")
    stopped.expect("end 1 False")  # the begin that nobody waited for any more was withdrawn
    stopped.expect("begin 2")
    running.expect("begin 5")


def test_a_full_socket_blocks_nobody_and_loses_nothing(world: World, peers: Peers) -> None:
    receiver = peers.receiver()
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    receiver.stop()
    for number in range(1, 1001):
        connection.begin(lease(number))
        connection.finish(lease(number), False)
    receiver.resume()
    connection.begin(lease(2000)).result(TIMEOUT_S)
    connection.finish(lease(2000), True).result(TIMEOUT_S)
    lines = receiver.lines_until("end 2000 True")
    begun = [line.split()[1] for line in lines if line.startswith("begin")]
    ended = [line.split()[1] for line in lines if line.startswith("end")]
    assert begun == ended == [*map(str, range(1, 1001)), "2000"]


def test_a_receiver_killed_while_a_writer_waits(world: World, peers: Peers) -> None:
    receiver = peers.receiver()
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    connection.begin(lease()).result(TIMEOUT_S)
    receiver.stop()
    finishing = connection.finish(lease(), True)
    receiver.kill()
    with pytest.raises(TransferFailed):
        finishing.result(2)


def test_a_writer_is_told_when_its_receiver_is_killed(world: World, peers: Peers) -> None:
    receiver = peers.receiver()
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    stops: queue.Queue[MicroservingError] = queue.Queue()
    connection.begin(lease(), stops.put).result(TIMEOUT_S)
    receiver.kill()
    assert isinstance(stops.get(timeout=2), TransferFailed)


@pytest.mark.case("PD-48")
@pytest.mark.case("PD-18")
def test_ten_kills_and_restarts_leave_nothing(world: World, peers: Peers) -> None:
    shm_before = sorted(os.listdir("/dev/shm"))
    sender = world.transport()
    for round_number in range(10):
        epoch = f"e{round_number}"
        receiver = peers.receiver("d0", epoch)
        connection = sender.connect("d0", epoch, TIMEOUT_S)
        mine = lease(1, epoch=epoch)
        connection.begin(mine).result(TIMEOUT_S)
        assert len(os.listdir(world.runtime_dir)) == 1
        if round_number % 2:
            connection.finish(mine, True).result(TIMEOUT_S)
        receiver.kill()
        assert not connection.alive
    assert sorted(os.listdir("/dev/shm")) == shm_before
    world.receiver(RecordingObserver(), "d1")
    assert len(os.listdir(world.runtime_dir)) == 1


def test_a_receiver_that_ends_in_order_removes_its_socket(world: World, peers: Peers) -> None:
    receiver = peers.receiver()
    assert receiver.process.stdin is not None
    receiver.process.stdin.close()
    assert receiver.process.wait(10) == 0
    assert os.listdir(world.runtime_dir) == []


def test_a_receiver_without_file_descriptors_refuses_and_recovers(world: World, peers: Peers) -> None:
    receiver = peers.receiver("d0", "e1", 16)
    senders = [world.transport() for _ in range(12)]
    connected = []
    for sender in senders:
        try:
            connected.append(sender.connect("d0", "e1", 2.0))
        except TransferFailed:
            continue
    assert 0 < len(connected) < 12
    for connection in connected[1:]:
        connection.close()
    connected[0].begin(lease()).result(TIMEOUT_S)  # those before us in the receiver's queue are gone now
    receiver.expect("begin 1")
    late = world.transport().connect("d0", "e1", TIMEOUT_S)
    late.begin(lease(2)).result(TIMEOUT_S)
    receiver.expect("begin 2")


def test_closing_ends_a_connect_that_waits_for_a_stopped_receiver(world: World, peers: Peers) -> None:
    receiver = peers.receiver()
    under_way = threading.Event()

    def identify(link: socket.socket) -> sockets.Peer:
        under_way.set()
        return sockets.identify(link)

    sender = SharedMemoryTransport(runtime_dir=world.runtime_dir, identify=identify)
    receiver.stop()
    raised: list[Exception] = []

    def connect() -> None:
        try:
            sender.connect("d0", "e1", 60)
        except TransferFailed as error:
            raised.append(error)

    connecting = threading.Thread(target=connect)
    connecting.start()
    assert under_way.wait(TIMEOUT_S)
    sender.close()
    connecting.join(2)
    assert not connecting.is_alive()
    assert len(raised) == 1
