"""The receiving end: accepts writers, gives them the pool, and tells the lease observer when they begin and stop.

All of it runs on the transport's thread and never waits for a peer. A writer that is stopped keeps its leases; a
writer that hangs up or ends has stopped writing, so its unfinished leases end. A writer that breaks the protocol, or
whose socket fails in any other way, is not heard any more, but it may still write: its leases end with its process.
The lease words follow all that: granted with the lease, cleared before the observer hears that a write ended.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from microserving.transports.base import Lease, LeaseObserver
from microserving.transports.lease_words import LeaseWords
from microserving.transports.shared_memory.event_loop import READ, WRITE, EventLoop
from microserving.transports.shared_memory.frames import (
    MAX_FRAME_BYTES,
    Frame,
    FrameError,
    Hello,
    Op,
    decode_frame,
    encode_frame,
    encode_hello,
)
from microserving.transports.shared_memory.sockets import HANG_UP, Peer, is_ready

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Writer:
    """One connected sender.

    unsent: what its full socket did not take; nothing is read until it is sent, so it has one reply and one REVOKED
    a lease at the most. blocked: we wait for room. heard: False once we do not listen to it any more.
    """

    link: socket.socket
    pidfd: int
    leases: dict[int, Lease] = field(default_factory=dict)
    unsent: deque[bytes] = field(default_factory=deque)
    blocked: bool = False
    heard: bool = True


class Receiver:
    """Serves writers on ``listener``. Owns the listener and every accepted connection. Loop thread only."""

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        pool_fd: int,
        hello: Hello,
        observer: LeaseObserver,
        words: LeaseWords,
        identify: Callable[[socket.socket], Peer],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._pool_fd = pool_fd
        self._hello = hello
        self._observer = observer
        self._words = words
        self._identify = identify
        self._writers: set[_Writer] = set()
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def start(self) -> None:
        self._loop.watch(self._listener.fileno(), READ, self._accept)

    def revoke(self, lease_id: int) -> None:
        """Tell the lease's writer, if there is one, that it need not go on."""
        for writer in list(self._writers):
            if writer.heard and lease_id in writer.leases:
                self._send(writer, Frame(Op.REVOKED, 0, lease_id))

    def close(self) -> None:
        """Hang up on every writer (their unfinished leases end) and stop to listen."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for writer in list(self._writers):
            self._end(writer)
        os.close(self._spare_fd)

    # ------------------------------------------------------------------------------------------------- connections

    def _accept(self, _: int) -> None:
        try:
            link, _address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of file descriptors: refuse this one, or the loop would spin on it
            _log.warning("cannot accept a KV writer: %s", error.strerror)
            self._refuse_one()
            return
        link.setblocking(False)
        try:
            peer = self._identify(link)
        except OSError:
            link.close()
            return
        if peer.uid != os.getuid():
            _log.warning("refused a KV writer of user %d", peer.uid)
            os.close(peer.pidfd)
            link.close()
            return
        self._welcome(_Writer(link, peer.pidfd))

    def _refuse_one(self) -> None:
        os.close(self._spare_fd)
        with suppress(OSError):
            self._listener.accept()[0].close()
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _welcome(self, writer: _Writer) -> None:
        self._writers.add(writer)
        self._loop.watch(writer.pidfd, READ, lambda _: self._end(writer))
        self._loop.watch(writer.link.fileno(), READ, lambda events: self._serve(writer, events))
        try:
            socket.send_fds(writer.link, [encode_hello(self._hello)], [self._pool_fd])
        except OSError:
            self._end(writer)

    def _end(self, writer: _Writer) -> None:
        """The writer is gone: release what it has. Idempotent."""
        if writer not in self._writers:
            return
        self._writers.remove(writer)
        self._loop.forget(writer.link.fileno())
        self._loop.forget(writer.pidfd)
        writer.link.close()
        os.close(writer.pidfd)
        for lease in writer.leases.values():
            self._words.end(lease.lease_id)
            self._observer.end_write(lease, False)

    def _distrust(self, writer: _Writer, why: Exception) -> None:
        _log.error("a KV writer cannot be heard (%s); its leases are kept until its process ends", why)
        writer.heard = False
        for lease_id in writer.leases:
            self._words.end(lease_id)
        self._loop.forget(writer.link.fileno())
        with suppress(OSError):
            writer.link.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------------------------------------------ frames

    def _serve(self, writer: _Writer, events: int) -> None:
        if writer.blocked:
            if events & WRITE:
                self._flush(writer)
            return
        try:
            data, _, flags, _ = writer.link.recvmsg(MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except HANG_UP:
            self._end(writer)
            return
        except OSError as error:
            self._distrust(writer, error)
            return
        if not data and is_ready(writer.link.fileno(), select.POLLHUP):
            self._end(writer)
            return
        try:
            if flags & socket.MSG_TRUNC:
                raise FrameError("frame too long")
            frame = decode_frame(data)
            reply = self._handle(writer, frame)
        except FrameError as error:
            self._distrust(writer, error)
            return
        self._send(writer, reply)

    def _handle(self, writer: _Writer, frame: Frame) -> Frame:
        """The reply."""
        if frame.op is Op.BEGIN:
            word = self._begin(writer, frame)
            granted = word is not None
            return Frame(Op.REPLY, frame.number, frame.lease_id, granted, word=word or 0)
        if frame.op is Op.FINISH:
            return Frame(Op.REPLY, frame.number, frame.lease_id, self._finish(writer, frame))
        raise FrameError("a writer only begins and finishes")

    def _begin(self, writer: _Writer, frame: Frame) -> int | None:
        """The lease's word, None when it is refused."""
        lease = Lease(self._hello.engine_id, self._hello.epoch, frame.request_id, frame.lease_id)
        word = self._words.claim(lease.lease_id)
        if word is None:
            return None
        if not self._observer.begin_write(lease):
            self._words.end(lease.lease_id)
            return None
        writer.leases[lease.lease_id] = lease
        self._words.grant(lease.lease_id)
        return word

    def _finish(self, writer: _Writer, frame: Frame) -> bool:
        begun = writer.leases.pop(frame.lease_id, None)
        if begun is None:
            return False
        self._words.end(begun.lease_id)
        return self._observer.end_write(begun, frame.flag) or not frame.flag

    def _send(self, writer: _Writer, frame: Frame) -> None:
        writer.unsent.append(encode_frame(frame))
        self._flush(writer)

    def _flush(self, writer: _Writer) -> None:
        """Send what is to be sent, and until that is done read nothing."""
        try:
            while writer.unsent:
                writer.link.send(writer.unsent[0])
                writer.unsent.popleft()
        except BlockingIOError:
            pass
        except HANG_UP:
            self._end(writer)
            return
        except OSError as error:
            self._distrust(writer, error)
            return
        if writer.blocked != bool(writer.unsent):
            writer.blocked = not writer.blocked
            events = WRITE if writer.blocked else READ
            self._loop.watch(writer.link.fileno(), events, lambda ready: self._serve(writer, ready))
