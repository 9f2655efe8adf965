"""Peers over shared memory that are not what they say, break the protocol, or meet errors of their sockets."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.errors import MicroservingError, TransferFailed
from microserving.transports.shared_memory import SharedMemoryTransport, frames, memory, sockets
from microserving.transports.shared_memory.connection import SharedMemoryConnection
from microserving.transports.shared_memory.frames import Frame, FrameError, Hello, Op

from .conformance_harness import PAGE_BYTES, PAGES, TIMEOUT_S, RecordingObserver, World, lease
from .leaks import fds_come_to, open_fds, pool_maps

NBYTES = PAGES * PAGE_BYTES
GOOD_HELLO = Hello("d0", "e1", NBYTES, PAGES)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World("shared_memory", tmp_path / "run")
    yield made
    made.close()


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
    before = open_fds()
    maps = pool_maps()
    with _forged_receiver(world.runtime_dir, hello, make_fds()), pytest.raises(TransferFailed, match=says):
        sender.connect("d0", "e1", TIMEOUT_S)
    assert fds_come_to(before)
    assert pool_maps() == maps


def test_only_one_fd_is_taken(world: World) -> None:
    sender = world.transport()
    before = open_fds()
    extra = [*_sealed(), *_sealed(), os.open("/dev/null", os.O_RDONLY)]
    with _forged_receiver(world.runtime_dir, frames.encode_hello(GOOD_HELLO), extra):
        connection = sender.connect("d0", "e1", TIMEOUT_S)
        connection.close()
    del connection
    assert fds_come_to(before)


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
