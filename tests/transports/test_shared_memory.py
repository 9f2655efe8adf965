"""What is particular to shared memory: seals, geometry, sockets, peers, leaks."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import pickle
import queue
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.errors import MicroservingError, StartupError, TransferFailed
from microserving.transports.shared_memory import SharedMemoryTransport, frames, memory, sockets
from microserving.transports.shared_memory.connection import SharedMemoryConnection
from microserving.transports.shared_memory.frames import Frame, FrameError, Hello, Op
from microserving.transports.shared_memory.sockets import Peer

from .conformance_harness import PAGE_BYTES, PAGES, TIMEOUT_S, RecordingObserver, World, lease

NBYTES = PAGES * PAGE_BYTES
GOOD_HELLO = Hello("d0", "e1", NBYTES, PAGES)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World("shared_memory", tmp_path / "run")
    yield made
    made.close()


def _fds() -> int:
    gc.collect()  # what earlier tests left in cycles
    return len(os.listdir("/proc/self/fd"))


def _fds_come_to(count: int) -> bool:
    """Whether so many are open, at last: a thread that an earlier test left may hold one for a moment."""
    deadline = time.monotonic() + TIMEOUT_S
    while _fds() != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return _fds() == count


def _pool_maps() -> int:
    return Path("/proc/self/maps").read_text().count("microserving-kv")


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
    before = _fds()
    with pytest.raises(StartupError, match=r"needs 1048576 MiB, only \d+ MiB of memory are available"):
        memory.create_sealed_memory(2**40)
    assert _fds() == before


def test_memory_that_the_kernel_refuses_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = _fds()
    with pytest.raises(StartupError, match="needs 1 MiB, Cannot allocate memory"):
        memory.create_sealed_memory(2**20)
    assert _fds() == before


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


# --------------------------------------------------------------------------------------- receivers that are not true


@contextmanager
def _forged_receiver(runtime_dir: Path, hello: bytes, fds: list[int]) -> Iterator[None]:
    """Somebody who listens where d0/e1 should be, and sends ``hello`` and ``fds`` to one writer."""
    with sockets.private_directory(runtime_dir) as directory:
        listener = sockets.listen(directory, sockets.socket_name("d0", "e1"))
    listener.settimeout(TIMEOUT_S)

    def serve() -> None:
        link, _ = listener.accept()
        with link:
            socket.send_fds(link, [hello], fds)
            link.settimeout(TIMEOUT_S)
            link.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(TIMEOUT_S)
        listener.close()
        for fd in fds:
            os.close(fd)


def _sealed() -> list[int]:
    return [memory.create_pool(NBYTES)]


def _unsealed() -> list[int]:
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return [fd]


def _file() -> list[int]:
    return [os.open(__file__, os.O_RDONLY)]


def _device() -> list[int]:
    return [os.open("/dev/zero", os.O_RDWR)]


def _nothing() -> list[int]:
    return []


@pytest.mark.case("PD-24")
@pytest.mark.parametrize(
    ("hello", "make_fds", "says"),
    [
        (frames.encode_hello(replace(GOOD_HELLO, nbytes=2 * NBYTES)), _sealed, "announced"),
        (frames.encode_hello(replace(GOOD_HELLO, nbytes=NBYTES // 2)), _sealed, "announced"),
        (frames.encode_hello(replace(GOOD_HELLO, nbytes=2**64 - 1)), _sealed, "announced"),
        (frames.encode_hello(replace(GOOD_HELLO, nbytes=0)), _sealed, "announced"),
        (frames.encode_hello(replace(GOOD_HELLO, total_pages=0)), _sealed, "whole pages"),
        (frames.encode_hello(replace(GOOD_HELLO, total_pages=3)), _sealed, "whole pages"),
        (frames.encode_hello(replace(GOOD_HELLO, total_pages=2**64 - 1)), _sealed, "whole pages"),
        (
            frames.encode_hello(replace(GOOD_HELLO, total_pages=4)),
            _sealed,
            "4096 bytes here, 8192 at the receiver",
        ),
        (frames.encode_hello(GOOD_HELLO), _unsealed, "not sealed"),
        (frames.encode_hello(GOOD_HELLO), _file, "not a memfd"),
        (frames.encode_hello(GOOD_HELLO), _device, "not a memfd"),
        (frames.encode_hello(GOOD_HELLO), _nothing, "another engine"),
        (frames.encode_hello(replace(GOOD_HELLO, epoch="e0")), _sealed, "another engine"),
        (frames.encode_hello(replace(GOOD_HELLO, engine_id="d1")), _sealed, "another engine"),
        (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, _sealed, "protocol"),
        (b"x", _sealed, "protocol"),
        (frames.encode_hello(GOOD_HELLO) + b"x", _sealed, "protocol"),
    ],
)
def test_forged_receivers_are_refused(
    world: World, hello: bytes, make_fds: Callable[[], list[int]], says: str
) -> None:
    sender = world.receiver(RecordingObserver(), "p0")
    before = _fds()
    maps = _pool_maps()
    with _forged_receiver(world.runtime_dir, hello, make_fds()), pytest.raises(TransferFailed, match=says):
        sender.connect("d0", "e1", TIMEOUT_S)
    assert _fds_come_to(before)
    assert _pool_maps() == maps


def test_only_one_fd_is_taken(world: World) -> None:
    sender = world.transport()
    before = _fds()
    extra = [*_sealed(), *_sealed(), os.open("/dev/null", os.O_RDONLY)]
    with _forged_receiver(world.runtime_dir, frames.encode_hello(GOOD_HELLO), extra):
        connection = sender.connect("d0", "e1", TIMEOUT_S)
        connection.close()
    del connection
    assert _fds_come_to(before)


# ------------------------------------------------------------------------------------------- writers that are not true


def _raw_writer(world: World) -> socket.socket:
    with sockets.private_directory(world.runtime_dir) as directory:
        link = sockets.connect(directory, sockets.socket_name("d0", "e1"), TIMEOUT_S)
    _, fds, _, _ = socket.recv_fds(link, 4096, 1)
    os.close(fds[0])
    return link


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.case("SC-01")
@pytest.mark.parametrize(
    "garbage", ["pickle", "empty", "long", "reply", "short", "op", "flag", "length", "utf8"]
)
def test_a_writer_that_breaks_the_protocol_is_not_heard_but_keeps_its_pages(
    world: World, tmp_path: Path, garbage: str
) -> None:
    observer = RecordingObserver()
    world.receiver(observer)
    marker = tmp_path / "marker"
    good = frames.encode_frame(Frame(Op.BEGIN, 1, 1, False, "request-1"))
    sent = {
        "pickle": pickle.dumps(_Bomb(marker)),
        "empty": b"",
        "long": b"\1" * 100_000,
        "reply": frames.encode_frame(Frame(Op.REPLY, 1, 1, True)),
        "short": good[:10],
        "op": b"\x09" + good[1:],
        "flag": good[:1] + b"\x02" + good[2:],
        "length": good + b"x",
        "utf8": frames.encode_frame(Frame(Op.BEGIN, 1, 2, False, "ab"))[:-2] + b"\xff\xff",
    }[garbage]
    with _raw_writer(world) as raw:
        raw.send(good)
        assert frames.decode_frame(raw.recv(4096)) == Frame(Op.REPLY, 1, 1, True)
        raw.send(sent)
        assert raw.recv(4096) == b""  # hung up
    honest = world.transport().connect("d0", "e1", TIMEOUT_S)
    honest.begin(lease(5)).result(TIMEOUT_S)
    honest.finish(lease(5), True).result(TIMEOUT_S)
    # This process, the writer, still lives and might write: its lease has not ended.
    assert observer.events == [("begin", lease(1)), ("begin", lease(5)), ("end", lease(5), True)]
    assert not marker.exists()
    world.close()
    assert observer.events[-1] == ("end", lease(1), False)


def test_a_writer_that_does_not_read_its_replies_is_not_read_either(world: World) -> None:
    world.receiver(RecordingObserver())
    honest = world.transport().connect("d0", "e1", TIMEOUT_S)

    def others_are_served(number: int) -> None:
        honest.begin(lease(number)).result(TIMEOUT_S)
        honest.finish(lease(number), True).result(TIMEOUT_S)

    with _raw_writer(world) as raw:
        raw.setblocking(False)
        sent = 0
        full = False
        while not full:  # until both queues are: the receiver's, and ours of replies
            try:
                raw.send(frames.encode_frame(Frame(Op.FINISH, sent, sent)))
                sent += 1
            except BlockingIOError:
                others_are_served(sent + 1)
                full = not sockets.is_ready(raw.fileno(), select.POLLOUT)
        raw.settimeout(TIMEOUT_S)
        numbers = [frames.decode_frame(raw.recv(4096)).number for _ in range(sent)]
        assert numbers == list(range(sent))  # read again, nothing was lost


class FailingSocket:
    """A socket whose next calls of one kind fail."""

    def __init__(self, inner: socket.socket, call: str) -> None:
        self._inner = inner
        self._call = call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            return self._fail
        return getattr(self._inner, name)

    def _fail(self, *_: object) -> None:
        raise OSError(errno.ENOBUFS, "no buffer space")


@pytest.mark.case("PD-40")
@pytest.mark.parametrize("call", ["send", "recvmsg"])
def test_a_receivers_socket_error_is_no_proof_that_the_writer_stopped(world: World, call: str) -> None:
    observer = RecordingObserver()
    receiver = world.receiver(observer)
    assert isinstance(receiver, SharedMemoryTransport)
    assert receiver._receiver is not None
    writers = receiver._receiver._writers
    connection = world.transport().connect("d0", "e1", TIMEOUT_S)
    connection.begin(lease()).result(TIMEOUT_S)
    (writer,) = writers
    writer.link = FailingSocket(writer.link, call)  # type: ignore[assignment]
    with pytest.raises(TransferFailed):
        connection.begin(lease(2)).result(TIMEOUT_S)
    receiver.revoke(1)
    receiver._loop.call(lambda: None)
    assert not [event for event in observer.events if event[0] == "end"]
    assert writers == {writer}
    receiver.close()  # which ends the mapping's use here
    assert ("end", lease(), False) in observer.events


@pytest.mark.case("PD-40")
@pytest.mark.parametrize("call", ["send", "recvmsg"])
def test_a_writers_socket_error_does_not_tell_the_receiver_that_it_stopped(world: World, call: str) -> None:
    observer = RecordingObserver()
    world.receiver(observer)
    sender = world.transport()
    connection = sender.connect("d0", "e1", TIMEOUT_S)
    assert isinstance(connection, SharedMemoryConnection)
    stops: queue.Queue[MicroservingError] = queue.Queue()
    connection.begin(lease(), stops.put).result(TIMEOUT_S)
    connection._link = FailingSocket(connection._link, call)  # type: ignore[assignment]
    with pytest.raises(TransferFailed):
        connection.begin(lease(2)).result(TIMEOUT_S)
    assert isinstance(stops.get(timeout=TIMEOUT_S), TransferFailed)
    assert not connection.alive
    another = sender.connect("d0", "e1", TIMEOUT_S)
    another.begin(lease(3)).result(TIMEOUT_S)
    assert not [event for event in observer.events if event[0] == "end"]  # a put may still run
    connection.finish(lease(2), False)
    with pytest.raises(TransferFailed):
        connection.finish(lease(), False).result(TIMEOUT_S)
    observer.wait_for("end", lease(), False)  # the last one stopped: now the link is closed
    another.finish(lease(3), True).result(TIMEOUT_S)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes) -> None:
    for decode in (frames.decode_frame, frames.decode_hello):
        try:
            decode(data)
        except FrameError:
            continue


@given(
    op=st.sampled_from(Op),
    number=st.integers(0, 2**64 - 1),
    lease_id=st.integers(0, 2**63 - 1),
    flag=st.booleans(),
    request_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=256),
    word=st.integers(0, 2**32 - 1),
)
def test_frames_survive(**fields: object) -> None:
    frame = Frame(**fields)  # type: ignore[arg-type]
    data = frames.encode_frame(frame)
    assert len(data) <= frames.MAX_FRAME_BYTES
    assert frames.decode_frame(data) == frame


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
    before = _fds()
    with pytest.raises(TransferFailed):
        sender.connect("d0", "e1", TIMEOUT_S)
    assert observer.events == []
    assert _fds_come_to(before)


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
    before = _fds()
    with one, pytest.raises(ConnectionResetError):
        sockets.identify(one)
    assert _fds() == before - 1


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
    fds, maps = _fds(), _pool_maps()
    for number in range(1, 201):
        link(number)
    receiver._loop.call(gc.collect)
    assert _fds() == fds
    assert _pool_maps() == maps


@pytest.mark.case("PD-55")
def test_receivers_come_and_go_and_leave_nothing(world: World) -> None:
    sender = world.transport()
    world.receiver(RecordingObserver(), "first").close()
    fds, maps, threads = _fds(), _pool_maps(), threading.active_count()
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
    assert _fds() == fds
    assert _pool_maps() == maps
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
    assert _pool_maps() == 1
    pool.memory[:] = 3
    assert int(pool.memory.sum()) == 3 * NBYTES
    del pool
    gc.collect()
    assert _pool_maps() == 0


def test_a_domain_is_the_directory_by_whatever_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    places = [tmp_path / "run", tmp_path / "link" / "run", tmp_path / "other"]
    domains = []
    for place in places:
        with closing(SharedMemoryTransport(runtime_dir=place)) as transport:
            domains.append(transport.describe()["domain"])
    assert domains[0] == domains[1] != domains[2]
