"""The contract of a KV transport: one-sided writes into pages that the receiver reserved.

Both ends of a hand-off follow the same small state machine (WIRE: "Reservations"):

    receiver                                   sender
    prep_recv: lease issued, pages reserved
                                               connect(engine id, epoch)         -> Connection
    begin(lease) granted or refused     <----  Connection.begin(lease)
    the lease's word holds its id       ---->  puts into Connection.pool, layer by layer, each while the word holds
    revoke(lease id)                    ---->  on_stop: put nothing more, then finish(lease, False)
    finish(lease, ok) seen              <----  Connection.finish(lease, ok)
    (or the connection closed: the writer is gone)

The lease words are the receiver's one-sided way to say that a lease has ended: an array in memory that it shares with
its pool. ``begin`` names the lease's word; whoever puts reads it before every layer's put and writes nothing unless
it holds the lease's id. The receiver clears it the moment the lease ends, however it ends; it sends nothing for that.

After ``begin`` was granted the receiver must not give the lease's pages to anyone else until ``finish`` was seen or
the connection closed: neither a cancelled write nor ``revoke`` is a fence, and between the reading of the word and the
last store of a put lies a layer's worth of time. If the lease ends (abort, expiry) before ``begin``, its pages are free
at once and a later ``begin`` is refused. If it ends later, ``revoke`` saves the writer work that nobody wants.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from microserving.errors import MicroservingError

OnStop = Callable[[MicroservingError], None]
"""Tells a writer, at most once, to stop: LeaseError (revoked) or TransferFailed (the receiver is gone).

Called on any thread, from ``begin`` on until ``finish``. Must not block.
"""


def tell_nobody(_: MicroservingError) -> None:
    """The ``OnStop`` of a writer that finds out when it finishes."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Names one reservation at its receiver. lease_id: > 0, unique for the life of the receiver's process (epoch)."""

    engine_id: str
    epoch: str
    request_id: str
    lease_id: int


@dataclass(frozen=True, slots=True)
class LeaseGuard:
    """What a put checks: write only while ``RemotePool.leases[word] == lease_id``."""

    word: int
    lease_id: int


@dataclass(frozen=True, slots=True)
class RemotePool:
    """Another engine's KV pool as mapped memory.

    memory: uint8 [nbytes], writable. layout: the same page layout as ours but with its own page count.
    leases: int64 [words], the receiver's lease words, 64-byte aligned; to be read only.
    Both belong to one process (epoch) of the receiver: what is written here never reaches a later one. They stay
    mapped as long as this object is referenced, even after the connection closed or the owner died.
    """

    memory: npt.NDArray[np.uint8]
    total_pages: int
    leases: npt.NDArray[np.int64]


class LeaseObserver(Protocol):
    """The receiver's side: what the transport tells the owner of the reservations. Called from a transport thread."""

    def begin_write(self, lease: Lease) -> bool:
        """A writer wants to start. True = granted; the pages are the writer's until ``end_write``."""

    def end_write(self, lease: Lease, ok: bool) -> bool:
        """The writer stopped. ok: every byte is in place. Also called (ok=False) when a writer vanished. Idempotent.

        False = the lease had ended meanwhile (abort, expiry): the writer's ``finish(ok=True)`` then raises LeaseError.
        True = the bytes, if ok, count as arrived.
        """


class Connection(ABC):
    """A sender's link to one receiving engine (one epoch of it). Thread-safe; shared by all leases to that engine."""

    @property
    @abstractmethod
    def pool(self) -> RemotePool:
        """The receiver's pool."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False once the receiver closed the link or its process ended."""

    @abstractmethod
    def begin(self, lease: Lease, on_stop: OnStop = tell_nobody) -> Future[LeaseGuard]:
        """Ask to write. Never waits and never raises; the future does, when the receiver answers.

        Its result guards every put of this lease. It raises LeaseError when refused, TransferFailed when the receiver
        is gone; while the receiver is silent it is not done. Who will not wait any longer calls
        ``finish(lease, False)``, which withdraws the question.
        """

    @abstractmethod
    def finish(self, lease: Lease, ok: bool) -> Future[None]:
        """Tell the receiver that we stopped; it is told sooner or later whether or not somebody waits for the future.

        The future as of ``begin``. When ok, its result means that the receiver has counted every byte as arrived;
        LeaseError: the lease had ended, or is not being written here.
        """

    @abstractmethod
    def close(self) -> None:
        """Idempotent. The receiver treats leases begun here and not finished as failed."""


class Transport(ABC):
    """One engine's end. Created before the pool; ``close`` frees everything (idempotent)."""

    name: str

    @abstractmethod
    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The memory of this engine's KV pool: uint8 [nbytes], zeroed, page-aligned. Called once.

        Raises StartupError with the size when the memory cannot be had.
        """

    @abstractmethod
    def serve(self, engine_id: str, epoch: str, total_pages: int, observer: LeaseObserver) -> None:
        """Start to accept writers. Called once, after ``allocate``."""

    @abstractmethod
    def revoke(self, lease_id: int) -> None:
        """A lease that is being written to has ended: clear its word, tell its writer. Any thread; never waits.

        The word is clear when this returns. Does nothing for a lease that nobody writes.
        """

    @abstractmethod
    def describe(self) -> Mapping[str, str | int]:
        """What `/microserving/info` shows of this transport: public, no path, no secret.

        domain (if there): engines whose domains differ cannot reach each other through this transport.
        """

    @abstractmethod
    def connect(self, engine_id: str, epoch: str, timeout_s: float) -> Connection:
        """Link to a receiver, or return the live link. Blocks. Raises TransferFailed."""

    @abstractmethod
    def close(self) -> None: ...
