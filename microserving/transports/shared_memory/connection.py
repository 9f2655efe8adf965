"""The sending end of one link: asks and tells the receiver about leases, and knows when it is gone.

Callers (any thread) send their frames themselves; the transport's thread reads the replies and watches the receiver's
process. The puts need nothing of this: they go into the mapped pool.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from microserving.errors import LeaseError, TransferFailed
from microserving.transports.base import Connection, Lease, RemotePool
from microserving.transports.shared_memory.event_loop import READ, WRITE, EventLoop
from microserving.transports.shared_memory.frames import (
    MAX_FRAME_BYTES,
    Frame,
    FrameError,
    Op,
    decode_frame,
    encode_frame,
)
from microserving.transports.shared_memory.sockets import is_ready

_log = logging.getLogger(__name__)


class SharedMemoryConnection(Connection):
    """Owns the socket and the receiver's pidfd; both are closed on the loop thread, once."""

    def __init__(
        self,
        loop: EventLoop,
        link: socket.socket,
        pidfd: int,
        pool: RemotePool,
        engine_id: str,
        epoch: str,
        on_dead: Callable[[SharedMemoryConnection], None],
    ) -> None:
        self.engine_id = engine_id
        self.epoch = epoch
        self._loop = loop
        self._link = link
        self._pidfd = pidfd
        self._pool = pool
        self._on_dead = on_dead
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards all that follows, and the life of the two fds
        self._dead = False
        self._retired = False
        self._waiting: dict[int, Future[bool]] = {}
        self._writing: set[int] = set()  # leases granted (or asked for) and not finished
        self._unsent: deque[bytes] = deque()  # bounded by the leases in flight: at most two frames each
        link.setblocking(False)
        loop.call(self._start)

    @property
    def pool(self) -> RemotePool:
        return self._pool

    @property
    def alive(self) -> bool:
        with self._lock:
            return not self._dead and not self._gone()

    def begin(self, lease: Lease, timeout_s: float) -> None:
        if (lease.engine_id, lease.epoch) != (self.engine_id, self.epoch):
            raise LeaseError("the reservation was made by another process of the engine")
        with self._lock:
            if lease.lease_id in self._writing:
                raise LeaseError("the reservation is being written already")
            self._writing.add(lease.lease_id)
        try:
            granted = self._ask(Op.BEGIN, lease, False, timeout_s)
        except TransferFailed:
            self._withdraw(lease)
            raise
        if not granted:
            self._done_with(lease)
            raise LeaseError("the receiver does not know the reservation, or it has ended")

    def finish(self, lease: Lease, ok: bool, timeout_s: float) -> None:
        with self._lock:
            if lease.lease_id not in self._writing:
                raise LeaseError("the reservation is not being written here")
        try:
            counted = self._ask(Op.FINISH, lease, ok, timeout_s)
        finally:
            self._done_with(lease)
        if not counted:
            raise LeaseError("the reservation ended before its KV had arrived")

    def close(self) -> None:
        self._loop.call(self._drop)

    def retire(self) -> None:
        """Close when the last lease in flight is done: a newer process of the engine has taken its place."""
        with self._lock:
            self._retired = True
            idle = not self._writing
        if idle:
            self.close()

    # ------------------------------------------------------------------------------------------------ any thread

    def _ask(self, op: Op, lease: Lease, flag: bool, timeout_s: float) -> bool:
        number = next(self._numbers)
        frame = encode_frame(
            Frame(op, number, lease.lease_id, flag, lease.request_id if op is Op.BEGIN else "")
        )
        answer: Future[bool] = Future()
        with self._lock:
            if self._dead or self._gone():
                raise TransferFailed("the receiving engine is gone")
            self._waiting[number] = answer
            self._transmit(frame)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise TransferFailed(f"the receiving engine did not answer within {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def _withdraw(self, lease: Lease) -> None:
        """A `begin` was not answered: should it be granted later, take it back. Nobody waits for the reply."""
        with self._lock:
            if not self._dead:
                self._transmit(encode_frame(Frame(Op.FINISH, next(self._numbers), lease.lease_id)))
        self._done_with(lease)

    def _done_with(self, lease: Lease) -> None:
        with self._lock:
            self._writing.discard(lease.lease_id)
            close = self._retired and not self._writing
        if close:
            self.close()

    def _transmit(self, frame: bytes) -> None:
        """Send, or leave it to the loop when the receiver's queue is full. Under the lock; never waits."""
        if not self._unsent:
            try:
                self._link.send(frame)
                return
            except BlockingIOError:
                pass
            except OSError:
                return  # the receiver hung up: the loop sees it too and fails everybody who waits
        self._unsent.append(frame)
        self._loop.post(self._watch)

    def _gone(self) -> bool:
        """Whether the receiver's process has ended or hung up, even if the loop has not come to it. Under the lock."""
        return is_ready(self._pidfd, select.POLLIN) or is_ready(self._link.fileno(), select.POLLHUP)

    # --------------------------------------------------------------------------------------------- the loop thread

    def _start(self) -> None:
        self._loop.watch(self._pidfd, READ, lambda _: self._drop())
        self._watch()

    def _watch(self) -> None:
        with self._lock:
            if not self._dead:
                self._loop.watch(self._link.fileno(), READ | WRITE if self._unsent else READ, self._ready)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ:
            self._receive()

    def _flush(self) -> None:
        with self._lock:
            while self._unsent:
                try:
                    self._link.send(self._unsent[0])
                except BlockingIOError:
                    return
                except OSError:
                    break
                self._unsent.popleft()
        self._watch()

    def _receive(self) -> None:
        try:
            data, _, flags, _ = self._link.recvmsg(MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data, flags = b"", 0
        if not data:
            self._drop()
            return
        try:
            if flags & socket.MSG_TRUNC:
                raise FrameError("frame too long")
            frame = decode_frame(data)
        except (
            FrameError
        ) as error:  # do not hang up: a put may be running, and the receiver would free its pages
            _log.error("ignored what engine %s sent on its KV link: %s", self.engine_id, error)
            return
        with self._lock:
            answer = self._waiting.pop(frame.number, None)
        if answer is not None:
            answer.set_result(frame.op is Op.REPLY and frame.flag)

    def _drop(self) -> None:
        """The link is over: fail everybody who waits, give back the fds. The pool stays mapped while referenced."""
        with self._lock:
            if self._dead:
                return
            self._dead = True
            self._loop.forget(self._link.fileno())
            self._loop.forget(self._pidfd)
            self._link.close()
            os.close(self._pidfd)
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._unsent.clear()
        for answer in waiting:
            answer.set_exception(TransferFailed("the receiving engine is gone"))
        self._on_dead(self)
