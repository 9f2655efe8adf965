"""The shared-memory transport: ties pool memory, the socket in the runtime directory and the links together."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from microserving.errors import StartupError, TransferFailed
from microserving.transports.base import Connection, LeaseObserver, RemotePool, Transport
from microserving.transports.lease_words import LeaseWords
from microserving.transports.shared_memory import sockets
from microserving.transports.shared_memory.connection import SharedMemoryConnection
from microserving.transports.shared_memory.event_loop import EventLoop
from microserving.transports.shared_memory.frames import (
    MAX_FRAME_BYTES,
    MAX_NAME_BYTES,
    FrameError,
    Hello,
    decode_hello,
)
from microserving.transports.shared_memory.memory import create_pool, map_peer_pool, map_pool
from microserving.transports.shared_memory.receiver import Receiver
from microserving.transports.shared_memory.sockets import Peer, identify


class SharedMemoryTransport(Transport):
    """For engines of one user on one host. Thread-safe. One thread per transport serves every writer and every link.

    identify: who is at the other end of a socket (a test may put another user there).
    """

    name = "shared_memory"

    def __init__(
        self, *, runtime_dir: Path | None = None, identify: Callable[[socket.socket], Peer] = identify
    ) -> None:
        """Raises StartupError when the runtime directory is not this user's alone."""
        self._directory = runtime_dir or sockets.default_runtime_dir()
        with sockets.private_directory(self._directory) as directory:
            self._domain = sockets.domain(directory)
        self._identify = identify
        self._loop = EventLoop("kv-transport")
        self._pool_fd = -1
        self._nbytes = 0
        self._page_bytes: int | None = None
        self._memory: npt.NDArray[np.uint8] | None = None
        self._words: LeaseWords | None = None
        self._receiver: Receiver | None = None
        self._socket_name: str | None = None
        self._lock = threading.Lock()  # guards the four fields below
        self._links: dict[str, SharedMemoryConnection] = {}  # by engine id: the newest only
        self._old: set[SharedMemoryConnection] = set()  # replaced, with writes in flight
        self._opening: set[socket.socket] = set()  # a thread waits for the receiver's hello
        self._closed = False

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if self._memory is not None:
            raise StartupError("the KV pool is allocated already")
        self._pool_fd = create_pool(nbytes)
        self._nbytes = nbytes
        self._memory, leases = map_pool(self._pool_fd, nbytes, inherit=True)
        self._words = LeaseWords(leases)
        return self._memory

    def serve(self, engine_id: str, epoch: str, total_pages: int, observer: LeaseObserver) -> None:
        if self._memory is None or self._words is None or self._receiver is not None:
            raise StartupError("a transport is served once, after its KV pool is allocated")
        if total_pages < 1 or self._nbytes % total_pages:
            raise StartupError(f"a KV pool of {self._nbytes} bytes is not {total_pages} whole pages")
        if max(len(engine_id.encode()), len(epoch.encode())) > MAX_NAME_BYTES:
            raise StartupError(f"engine id or epoch longer than {MAX_NAME_BYTES} bytes")
        self._page_bytes = self._nbytes // total_pages
        name = sockets.socket_name(engine_id, epoch)
        with sockets.private_directory(self._directory) as directory:
            listener = sockets.listen(directory, name)
        self._socket_name = name
        hello = Hello(engine_id, epoch, self._nbytes, total_pages)
        receiver = Receiver(self._loop, listener, self._pool_fd, hello, observer, self._words, self._identify)
        self._receiver = receiver
        self._loop.call(receiver.start)

    def revoke(self, lease_id: int) -> None:
        if self._words is not None:
            self._words.end(lease_id)
        if self._receiver is not None:
            self._loop.post(partial(self._receiver.revoke, lease_id))

    def describe(self) -> Mapping[str, str | int]:
        return {"name": self.name, "nbytes": self._nbytes, "domain": self._domain}

    def connect(self, engine_id: str, epoch: str, timeout_s: float) -> Connection:
        with self._lock:
            link = self._links.get(engine_id)
        if link is not None and link.epoch == epoch and link.alive:
            return link
        return self._keep(self._open(engine_id, epoch, timeout_s))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = [*self._links.values(), *self._old]
            for opening in self._opening:
                with suppress(OSError):
                    opening.shutdown(socket.SHUT_RDWR)
        self._unlink_socket()
        if self._words is not None:
            self._words.end_all()
        for link in links:
            link.close()
        if self._receiver is not None:
            self._loop.call(self._receiver.close)
        self._loop.close()
        self._memory = None
        if self._pool_fd >= 0:
            os.close(self._pool_fd)

    # --------------------------------------------------------------------------------------------------- connecting

    def _open(self, engine_id: str, epoch: str, timeout_s: float) -> SharedMemoryConnection:
        """A new link. Raises TransferFailed."""
        try:
            with sockets.private_directory(self._directory) as directory:
                link = sockets.connect(directory, sockets.socket_name(engine_id, epoch), timeout_s)
        except (OSError, StartupError):
            raise TransferFailed(f"engine {engine_id} cannot be reached through shared memory") from None
        peer: Peer | None = None
        try:
            self._note_opening(link)
            peer = self._identify(link)
            if peer.uid != os.getuid():
                raise TransferFailed(f"the KV pool of engine {engine_id} belongs to another user")
            pool = self._receive_pool(link, engine_id, epoch)
            return SharedMemoryConnection(self._loop, link, peer.pidfd, pool, engine_id, epoch, self._forget)
        except BaseException as error:
            link.close()
            if peer is not None:
                os.close(peer.pidfd)
            if isinstance(error, OSError):
                raise TransferFailed(f"engine {engine_id} hung up or is silent") from None
            raise
        finally:
            with self._lock:
                self._opening.discard(link)

    def _note_opening(self, link: socket.socket) -> None:
        with self._lock:
            if self._closed:
                raise TransferFailed("this engine is stopping")
            self._opening.add(link)

    def _receive_pool(self, link: socket.socket, engine_id: str, epoch: str) -> RemotePool:
        """The pool that the receiver shows us. Raises TransferFailed, OSError."""
        data, fds, _, _ = socket.recv_fds(link, MAX_FRAME_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            hello = decode_hello(data)
            if (hello.engine_id, hello.epoch) != (engine_id, epoch) or len(fds) != 1:
                raise TransferFailed(f"another engine answered for {engine_id}")
            return map_peer_pool(fds[0], hello.nbytes, hello.total_pages, self._page_bytes)
        except FrameError:
            raise TransferFailed(f"engine {engine_id} does not speak this protocol") from None
        finally:
            for fd in fds:
                os.close(fd)

    def _keep(self, link: SharedMemoryConnection) -> SharedMemoryConnection:
        """Remember a new link as the newest of its engine, unless another thread was faster."""
        with self._lock:
            closed, old = self._closed, self._links.get(link.engine_id)
            same = old is not None and old.epoch == link.epoch and old.alive
            if not closed and not same:
                self._links[link.engine_id] = link
                if old is not None:
                    self._old.add(old)
        if closed:
            link.close()
            raise TransferFailed("this engine is stopping")
        if same and old is not None:
            link.close()
            return old
        if old is not None:
            old.retire()
        if not link.alive:
            self._forget(link)
        return link

    def _forget(self, link: SharedMemoryConnection) -> None:
        with self._lock:
            if self._links.get(link.engine_id) is link:
                del self._links[link.engine_id]
            self._old.discard(link)

    def _unlink_socket(self) -> None:
        if self._socket_name is None:
            return
        with suppress(OSError, StartupError), sockets.private_directory(self._directory) as directory:
            os.unlink(self._socket_name, dir_fd=directory)
