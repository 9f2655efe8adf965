"""What is particular to shared memory: seals, geometry, sockets, peers, leaks."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from microserving.errors import StartupError, TransferFailed
from microserving.transports.shared_memory import SharedMemoryTransport, memory, sockets
from microserving.transports.shared_memory.sockets import Peer

from .conformance_harness import PAGE_BYTES, PAGES, TIMEOUT_S, RecordingObserver, World, lease
from .leaks import fds_come_to, open_fds, pool_maps

NBYTES = PAGES * PAGE_BYTES


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World("shared_memory", tmp_path / "run")
    yield made
    made.close()


# ---------------------------------------------------------------------------------------------------------- memory


def test_the_memory_cannot_be_resized() -> None:
    fd = memory.create_sealed_memory(NBYTES)
    try:
        for size in (0, NBYTES - 1, NBYTES + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_all_memory_is_there_from_the_start() -> None:
    fd = memory.create_sealed_memory(NBYTES)
    assert os.fstat(fd).st_blocks * 512 == NBYTES
    os.close(fd)


@pytest.mark.case("PD-53")
def test_memory_that_does_not_fit_is_a_clear_error() -> None:
    before = open_fds()
    with pytest.raises(StartupError, match=r"needs 1048576 MiB, only \d+ MiB of memory are available"):
        memory.create_sealed_memory(2**40)
    assert open_fds() == before


def test_memory_that_the_kernel_refuses_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_fds()
    with pytest.raises(StartupError, match="needs 1 MiB, Cannot allocate memory"):
        memory.create_sealed_memory(2**20)
    assert open_fds() == before


def test_a_control_group_limits_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{64 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {10 * 2**20}\nfile {50 * 2**20}\nshmem {4 * 2**20}\n")
    monkeypatch.setattr(memory, "_CGROUPS", ((tmp_path, "memory.max"), (tmp_path / "none", "memory.max")))
    assert memory.available_memory() == 50 * 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() > 50 * 2**20


def test_forked_children_do_not_get_a_peers_pool(world: World) -> None:
    world.receiver(RecordingObserver())
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    address = f"{connection.pool.memory.ctypes.data:x}-"
    smaps = Path("/proc/self/smaps").read_text()
    flags = smaps[smaps.index(address) :].split("VmFlags:")[1].splitlines()[0]
    assert "dc" in flags.split()  # "do not copy on fork"


# ------------------------------------------------------------------------------------------------ who may connect


def _as_another_user(link: socket.socket) -> Peer:
    return replace(sockets.identify(link), uid=os.getuid() + 1)


def test_a_receiver_refuses_writers_of_another_user(world: World) -> None:
    receiver = SharedMemoryTransport(runtime_dir=world.runtime_dir, identify=_as_another_user)
    world.transports.append(receiver)
    receiver.allocate(NBYTES)
    observer = RecordingObserver()
    receiver.serve("d0", "e1", PAGES, observer)
    sender = world.transport()
    before = open_fds()
    with pytest.raises(TransferFailed):
        sender.connect("d0", "e1", TIMEOUT_S)
    assert observer.events == []
    assert fds_come_to(before)


def test_a_sender_refuses_a_receiver_of_another_user(world: World) -> None:
    world.receiver(RecordingObserver())
    sender = SharedMemoryTransport(runtime_dir=world.runtime_dir, identify=_as_another_user)
    world.transports.append(sender)
    with pytest.raises(TransferFailed, match="another user"):
        sender.connect("d0", "e1", TIMEOUT_S)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_a_peer_is_identified(monkeypatch: pytest.MonkeyPatch, old_kernel: bool) -> None:
    if old_kernel:
        monkeypatch.setattr(sockets, "_SO_PEERPIDFD", 9999)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        peer = sockets.identify(one)
        assert peer.uid == os.getuid()
        assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{peer.pidfd}").read_text()
        assert not os.get_inheritable(peer.pidfd)
        os.close(peer.pidfd)


def test_on_an_old_kernel_a_peer_that_is_gone_is_not_taken_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "_SO_PEERPIDFD", 9999)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.close()
    before = open_fds()
    with one, pytest.raises(ConnectionResetError):
        sockets.identify(one)
    assert open_fds() == before - 1


# -------------------------------------------------------------------------------------------- the runtime directory


def test_directory_and_socket_are_private(world: World) -> None:
    world.receiver(RecordingObserver())
    assert stat.S_IMODE(world.runtime_dir.stat().st_mode) == 0o700
    (entry,) = world.runtime_dir.iterdir()
    assert stat.S_ISSOCK(entry.stat().st_mode)
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(StartupError, match="mode 0700"):
        SharedMemoryTransport(runtime_dir=tmp_path)


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(StartupError, match="another user"):
        SharedMemoryTransport(runtime_dir=tmp_path)


def test_a_link_or_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file", "file/sub"):
        with pytest.raises(StartupError, match="cannot use the runtime directory"):
            SharedMemoryTransport(runtime_dir=tmp_path / name)


def test_long_names_and_long_paths(tmp_path: Path) -> None:
    world = World("shared_memory", tmp_path / ("x" * 200) / ("y" * 200))
    observer = RecordingObserver()
    world.receiver(observer, "d" * 128, "e" * 128)
    connection = world.transport().connect("d" * 128, "e" * 128, TIMEOUT_S)
    connection.begin(lease(1, "d" * 128, "e" * 128)).result(TIMEOUT_S)
    world.close()
    with pytest.raises(StartupError, match="128"):
        world.receiver(observer, "d" * 129)
    world.close()


def test_the_default_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = f"microserving-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert sockets.default_runtime_dir() == tmp_path / own
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert sockets.default_runtime_dir() == Path("/tmp") / own
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert sockets.default_runtime_dir() == Path("/tmp") / own


@pytest.mark.case("PD-48")
def test_dead_sockets_are_removed_and_living_ones_and_other_files_are_not(world: World) -> None:
    observer = RecordingObserver()
    world.receiver(observer, "alive")
    with sockets.private_directory(world.runtime_dir) as directory:
        sockets.listen(directory, sockets.socket_name("dead", "e1")).close()
    (world.runtime_dir / "other").touch()
    dead = world.runtime_dir / sockets.socket_name("dead", "e1")
    assert dead.exists()
    world.receiver(RecordingObserver(), "new")
    assert not dead.exists()
    assert {entry.name for entry in world.runtime_dir.iterdir()} == {
        "other",
        sockets.socket_name("alive", "e1"),
        sockets.socket_name("new", "e1"),
    }
    world.transport().connect("alive", "e1", TIMEOUT_S).begin(lease(1, "alive")).result(TIMEOUT_S)


# ----------------------------------------------------------------------------------------------------------- leaks


@pytest.mark.case("PD-42")
def test_two_hundred_links_leave_nothing(world: World) -> None:
    receiver = world.transport()
    receiver.allocate(NBYTES)
    observer = RecordingObserver()
    receiver.serve("d0", "e1", PAGES, observer)
    sender = world.transport()

    def link(number: int) -> None:
        connection = sender.connect("d0", "e1", TIMEOUT_S)
        connection.begin(lease(number)).result(TIMEOUT_S)
        if number % 2:
            connection.finish(lease(number), True).result(TIMEOUT_S)
        connection.close()
        observer.wait_for("end", lease(number), number % 2 == 1)

    link(201)
    receiver._loop.call(gc.collect)
    fds, maps = open_fds(), pool_maps()
    for number in range(1, 201):
        link(number)
    receiver._loop.call(gc.collect)
    assert open_fds() == fds
    assert pool_maps() == maps


@pytest.mark.case("PD-55")
def test_receivers_come_and_go_and_leave_nothing(world: World) -> None:
    sender = world.transport()
    world.receiver(RecordingObserver(), "first").close()
    fds, maps, threads = open_fds(), pool_maps(), threading.active_count()
    for number in range(20):
        epoch = f"e{number}"
        receiver = world.receiver(RecordingObserver(), "d0", epoch)
        sender.connect("d0", epoch, TIMEOUT_S).begin(lease(1, epoch=epoch)).result(TIMEOUT_S)
        receiver.close()
        world.transports.pop()
        sender._loop.call(lambda: None)
        with pytest.raises(TransferFailed):
            sender.connect("d0", epoch, TIMEOUT_S)
        del receiver
    gc.collect()
    assert open_fds() == fds
    assert pool_maps() == maps
    assert threading.active_count() == threads
    assert list(world.runtime_dir.iterdir()) == []


def test_a_pool_stays_mapped_while_it_is_referenced(world: World) -> None:
    receiver = world.receiver(RecordingObserver())
    sender = world.transport()
    pool = sender.connect("d0", "e1", TIMEOUT_S).pool
    receiver.close()
    sender.close()
    world.transports.clear()
    del receiver, sender
    gc.collect()
    assert pool_maps() == 1
    pool.memory[:] = 3
    assert int(pool.memory.sum()) == 3 * NBYTES
    del pool
    gc.collect()
    assert pool_maps() == 0


def test_a_domain_is_the_directory_by_whatever_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    places = [tmp_path / "run", tmp_path / "link" / "run", tmp_path / "other"]
    domains = []
    for place in places:
        with closing(SharedMemoryTransport(runtime_dir=place)) as transport:
            domains.append(transport.describe()["domain"])
    assert domains[0] == domains[1] != domains[2]
