"""The sending end of one link: asks and tells the receiver about leases, and knows when it is gone.

Callers (any thread) send their frames themselves; the transport's thread reads the replies and watches the receiver's
process. The puts need nothing of this: they go into the mapped pool. A link that fails while the receiver lives is not
closed before the last write has stopped, because closing it tells the receiver just that.
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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from microserving.errors import LeaseError, MicroservingError, TransferFailed
from microserving.transports.base import Connection, Lease, LeaseGuard, OnStop, RemotePool, tell_nobody
from microserving.transports.shared_memory.event_loop import READ, WRITE, EventLoop
from microserving.transports.shared_memory.frames import (
    MAX_FRAME_BYTES,
    Frame,
    FrameError,
    Op,
    decode_frame,
    encode_frame,
)
from microserving.transports.shared_memory.sockets import HANG_UP, is_ready

_log = logging.getLogger(__name__)

_GONE = "the receiving engine is gone"
_BROKEN = "the link to the receiving engine failed"


@dataclass(frozen=True, slots=True)
class _Question:
    """A BEGIN or FINISH that is not answered yet."""

    op: Op
    lease_id: int
    answer: Future[Any] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.answer.set_running_or_notify_cancel()  # who does not wait any more must not hinder the reply


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
        self._broken = False
        self._retired = False
        self._waiting: dict[int, _Question] = {}
        self._writing: dict[
            int, OnStop | None
        ] = {}  # leases asked for and not finished; None: FINISH is under way
        self._unsent: deque[bytes] = deque()  # bounded by the leases in flight: at most two frames each
        link.setblocking(False)
        loop.call(self._start)

    @property
    def pool(self) -> RemotePool:
        return self._pool

    @property
    def alive(self) -> bool:
        with self._lock:
            return not self._why_not()

    def begin(self, lease: Lease, on_stop: OnStop = tell_nobody) -> Future[LeaseGuard]:
        if (lease.engine_id, lease.epoch) != (self.engine_id, self.epoch):
            return _failed(LeaseError("the reservation was made by another process of the engine"))
        with self._lock:
            if (why := self._why_not()) is not None:
                return _failed(TransferFailed(why))
            if lease.lease_id in self._writing:
                return _failed(LeaseError("the reservation is being written already"))
            self._writing[lease.lease_id] = on_stop
            return self._ask(Op.BEGIN, lease.lease_id, lease.request_id)

    def finish(self, lease: Lease, ok: bool) -> Future[None]:
        with self._lock:
            why = self._why_not()
            if why is None:
                if self._writing.get(lease.lease_id) is None:
                    return _failed(LeaseError("the reservation is not being written here"))
                self._writing[lease.lease_id] = None
                return self._ask(Op.FINISH, lease.lease_id, flag=ok)
            idle = self._done_with(lease.lease_id)
        if idle:
            self._loop.post(self._drop)
        return _failed(TransferFailed(why))

    def close(self) -> None:
        self._loop.call(self._drop)

    def retire(self) -> None:
        """Close when the last lease in flight is done: a newer link has taken its place."""
        with self._lock:
            self._retired = True
            idle = not self._writing
        if idle:
            self.close()

    # ------------------------------------------------------------------------------------------------ any thread

    def _why_not(self) -> str | None:
        """Why this link is of no use any more, None while it is. Under the lock."""
        if self._broken:
            return _BROKEN
        return _GONE if self._dead or self._gone() else None

    def _gone(self) -> bool:
        """Whether the receiver's process has ended or hung up, even if the loop has not come to it. Under the lock."""
        return is_ready(self._pidfd, select.POLLIN) or is_ready(self._link.fileno(), select.POLLHUP)

    def _ask(self, op: Op, lease_id: int, request_id: str = "", *, flag: bool = False) -> Future[Any]:
        """Under the lock."""
        question = _Question(op, lease_id)
        number = next(self._numbers)
        self._waiting[number] = question
        self._transmit(encode_frame(Frame(op, number, lease_id, flag, request_id)))
        return question.answer

    def _done_with(self, lease_id: int) -> bool:
        """Whether the link is to be closed now. Under the lock."""
        self._writing.pop(lease_id, None)
        return self._retired and not self._writing

    def _transmit(self, frame: bytes) -> None:
        """Send, or leave it to the loop when the receiver's queue is full. Under the lock; never waits."""
        if not self._unsent:
            try:
                self._link.send(frame)
                return
            except BlockingIOError:
                pass
            except HANG_UP:
                return  # the loop sees it too and fails everybody who waits
            except OSError as error:
                self._loop.post(partial(self._break, error))
                return
        self._unsent.append(frame)
        self._loop.post(self._watch)

    # --------------------------------------------------------------------------------------------- the loop thread

    def _start(self) -> None:
        self._loop.watch(self._pidfd, READ, lambda _: self._drop())
        self._watch()

    def _watch(self) -> None:
        with self._lock:
            if not self._dead and not self._broken:
                self._loop.watch(self._link.fileno(), READ | WRITE if self._unsent else READ, self._ready)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ:
            self._receive()

    def _flush(self) -> None:
        failure: OSError | None = None
        with self._lock:
            while self._unsent and not self._dead and not self._broken:
                try:
                    self._link.send(self._unsent[0])
                except BlockingIOError:
                    return
                except HANG_UP:
                    break
                except OSError as error:
                    failure = error
                    break
                self._unsent.popleft()
        if failure is not None:
            self._break(failure)
        self._watch()

    def _receive(self) -> None:
        if self._dead or self._broken:
            return
        try:
            data, _, flags, _ = self._link.recvmsg(MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except HANG_UP:
            data, flags = b"", 0
        except OSError as error:
            self._break(error)
            return
        if not data:
            self._drop()
            return
        try:
            if flags & socket.MSG_TRUNC:
                raise FrameError("frame too long")
            self._heard(decode_frame(data))
        except FrameError as error:
            # Do not hang up: a put may be running, and the receiver would free its pages.
            _log.error("ignored what engine %s sent on its KV link: %s", self.engine_id, error)

    def _heard(self, frame: Frame) -> None:
        if frame.op is Op.REVOKED:
            with self._lock:
                on_stop = self._writing.get(frame.lease_id)
                if on_stop is not None:
                    self._writing[frame.lease_id] = tell_nobody  # once
            if on_stop is not None:
                on_stop(LeaseError("the reservation has ended"))
            return
        if frame.word >= len(self._pool.leases):
            raise FrameError("no such lease word")
        with self._lock:
            question = self._waiting.pop(frame.number, None) if frame.op is Op.REPLY else None
            if question is None:
                raise FrameError("not an answer")
            over = question.op is Op.FINISH or not frame.flag
            idle = over and self._done_with(question.lease_id)
        if idle:
            self._drop()
        if frame.flag:
            guard = LeaseGuard(frame.word, question.lease_id) if question.op is Op.BEGIN else None
            question.answer.set_result(guard)
        elif question.op is Op.BEGIN:
            error = "the receiver does not know the reservation, or it has ended"
            question.answer.set_exception(LeaseError(error))
        else:
            question.answer.set_exception(LeaseError("the reservation ended before its KV had arrived"))

    def _break(self, error: OSError) -> None:
        """The link failed but nobody hung up: use it no more, and close it once nobody writes."""
        with self._lock:
            if self._dead or self._broken:
                return
            _log.error("the KV link to engine %s failed: %s", self.engine_id, error)
            self._broken = self._retired = True
            self._loop.forget(self._link.fileno())
            finishing = [lease_id for lease_id, on_stop in self._writing.items() if on_stop is None]
            for lease_id in finishing:  # it stopped, whether or not the receiver was told
                del self._writing[lease_id]
            idle = not self._writing
        self._fail(_BROKEN)
        if idle:
            self._drop()

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
        self._fail(_GONE)
        self._on_dead(self)

    def _fail(self, why: str) -> None:
        """Tell everybody who waits for an answer, and every writer."""
        with self._lock:
            questions = list(self._waiting.values())
            stops = [on_stop for on_stop in self._writing.values() if on_stop is not None]
            self._waiting.clear()
            self._unsent.clear()
            if self._dead:
                self._writing.clear()
            else:
                self._writing = dict.fromkeys(self._writing, tell_nobody)
        for question in questions:
            question.answer.set_exception(TransferFailed(why))
        for on_stop in stops:
            on_stop(TransferFailed(why))


def _failed(error: MicroservingError) -> Future[Any]:
    answer: Future[Any] = Future()
    answer.set_exception(error)
    return answer
