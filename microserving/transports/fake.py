"""The in-process transport: the whole contract without sockets, and faults on demand. For tests and trials.

Transports that share a `FakeNetwork` reach each other. Everything happens in the caller's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from microserving.errors import LeaseError, MicroservingError, StartupError, TransferFailed
from microserving.transports.base import (
    Connection,
    Lease,
    LeaseGuard,
    LeaseObserver,
    OnStop,
    RemotePool,
    Transport,
    tell_nobody,
)
from microserving.transports.lease_words import LEASE_BYTES, LeaseWords

_T = TypeVar("_T")


@dataclass(eq=False)
class FakeNetwork:
    """Who can be reached, and the faults: refuse_begin refuses every write; fail_finish loses every finish.

    silent: receivers get nothing and say nothing, as if they were stopped, until ``resume``.
    """

    refuse_begin: bool = False
    fail_finish: bool = False
    silent: bool = False
    receivers: dict[tuple[str, str], FakeTransport] = field(default_factory=dict)
    _held: list[Callable[[], None]] = field(default_factory=list)

    def deliver(self, message: Callable[[], None]) -> None:
        """Let a message arrive: now, or after ``resume``."""
        if self.silent:
            self._held.append(message)
        else:
            message()

    def resume(self) -> None:
        """Let what was held arrive, in order."""
        self.silent = False
        held, self._held = self._held, []
        for message in held:
            message()


class FakeTransport(Transport):
    name = "fake"

    def __init__(self, *, runtime_dir: Path | None = None, network: FakeNetwork | None = None) -> None:  # noqa: ARG002
        """runtime_dir: not used. network None: a network of its own (it reaches itself only)."""
        self._network = network if network is not None else FakeNetwork()
        self._connecting = threading.Lock()  # guards _links
        self._lock = threading.Lock()  # guards _inbound and _closed
        self._memory: npt.NDArray[np.uint8] | None = None
        self._leases = _page_aligned(LEASE_BYTES).view(np.int64)
        self._words = LeaseWords(self._leases)
        self._total_pages = 0
        self._identity: tuple[str, str] | None = None
        self._observer: LeaseObserver | None = None
        self._inbound: list[FakeConnection] = []
        self._links: dict[str, FakeConnection] = {}
        self._closed = False

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        if self._memory is not None:
            raise StartupError("the KV pool is allocated already")
        if nbytes <= 0:
            raise StartupError(f"transport init failed: a KV pool of {nbytes} bytes was asked for")
        self._memory = _page_aligned(nbytes)
        return self._memory

    def serve(self, engine_id: str, epoch: str, total_pages: int, observer: LeaseObserver) -> None:
        if self._memory is None or self._observer is not None:
            raise StartupError("a transport is served once, after its KV pool is allocated")
        if total_pages < 1 or self._memory.nbytes % total_pages:
            raise StartupError(f"a KV pool of {self._memory.nbytes} bytes is not {total_pages} whole pages")
        if (engine_id, epoch) in self._network.receivers:
            raise StartupError("a live engine has this id and epoch")
        self._total_pages = total_pages
        self._observer = observer
        self._identity = (engine_id, epoch)
        self._network.receivers[self._identity] = self

    def revoke(self, lease_id: int) -> None:
        self._words.end(lease_id)
        with self._lock:
            links = list(self._inbound)
        for link in links:
            self._network.deliver(partial(link.revoke, lease_id))

    def describe(self) -> Mapping[str, str | int]:
        return {"name": self.name, "nbytes": 0 if self._memory is None else self._memory.nbytes}

    def connect(self, engine_id: str, epoch: str, timeout_s: float) -> Connection:  # noqa: ARG002
        receiver = self._network.receivers.get((engine_id, epoch))
        with self._connecting:
            old = self._links.get(engine_id)
            if old is not None and old.epoch == epoch and old.alive:
                return old
            if self._closed or receiver is None:
                raise TransferFailed(f"engine {engine_id} cannot be reached")
            link = self._links[engine_id] = receiver._accept(self._network)
        if old is not None:
            old.retire()
        return link

    def close(self) -> None:
        """Also what a process's death looks like to the others (``vanish``)."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = [*self._links.values(), *self._inbound]
        if self._identity is not None:
            self._network.receivers.pop(self._identity, None)
        self._words.end_all()
        for link in links:
            link.close()
        self._memory = None

    vanish = close

    def _accept(self, network: FakeNetwork) -> FakeConnection:
        with self._lock:
            if self._closed or self._memory is None or self._observer is None or self._identity is None:
                raise TransferFailed("the receiving engine is gone")
            pool = RemotePool(self._memory, self._total_pages, self._leases)
            link = FakeConnection(network, self._observer, pool, self._words, self._identity)
            self._inbound = [other for other in self._inbound if other.alive] + [link]
        return link


class FakeConnection(Connection):
    """Both ends of a link in one object."""

    def __init__(
        self,
        network: FakeNetwork,
        observer: LeaseObserver,
        pool: RemotePool,
        words: LeaseWords,
        receiver: tuple[str, str],
    ) -> None:
        self.engine_id, self.epoch = receiver
        self._network = network
        self._observer = observer
        self._pool = pool
        self._words = words
        self._lock = threading.RLock()  # guards the four below
        self._alive = True
        self._retired = False
        self._writing: dict[int, tuple[Lease, OnStop]] = {}
        self._unanswered: set[Future[Any]] = set()

    @property
    def pool(self) -> RemotePool:
        return self._pool

    @property
    def alive(self) -> bool:
        return self._alive

    def begin(self, lease: Lease, on_stop: OnStop = tell_nobody) -> Future[LeaseGuard]:
        return self._ask(partial(self._begin, lease, on_stop))

    def finish(self, lease: Lease, ok: bool) -> Future[None]:
        return self._ask(partial(self._finish, lease, ok))

    def revoke(self, lease_id: int) -> None:
        """Tell the lease's writer to stop, once."""
        with self._lock:
            if lease_id not in self._writing:
                return
            lease, on_stop = self._writing[lease_id]
            self._writing[lease_id] = (lease, tell_nobody)
        on_stop(LeaseError("the reservation has ended"))

    def close(self) -> None:
        with self._lock:
            self._alive = False
            writers = list(self._writing.values())
            self._writing.clear()
            unanswered = list(self._unanswered)
            self._unanswered.clear()
        gone = TransferFailed("the receiving engine is gone")
        for answer in unanswered:
            answer.set_exception(gone)
        for lease, on_stop in writers:
            self._words.end(lease.lease_id)
            self._observer.end_write(lease, False)
            on_stop(gone)

    def retire(self) -> None:
        """Close when the last lease in flight is done."""
        with self._lock:
            self._retired = True
            if not self._writing:
                self.close()

    def _ask(self, question: Callable[[], _T]) -> Future[_T]:
        answer: Future[_T] = Future()
        answer.set_running_or_notify_cancel()
        with self._lock:
            if not self._alive:
                answer.set_exception(TransferFailed("the receiving engine is gone"))
                return answer
            self._unanswered.add(answer)
        self._network.deliver(partial(self._answer, question, answer))
        return answer

    def _answer(self, question: Callable[[], _T], answer: Future[_T]) -> None:
        with self._lock:
            if answer not in self._unanswered:
                return
            self._unanswered.remove(answer)
            try:
                result = question()
            except MicroservingError as error:
                answer.set_exception(error)
            else:
                answer.set_result(result)

    def _begin(self, lease: Lease, on_stop: OnStop) -> LeaseGuard:
        if (lease.engine_id, lease.epoch) != (self.engine_id, self.epoch):
            raise LeaseError("the reservation was made by another process of the engine")
        if lease.lease_id in self._writing:
            raise LeaseError("the reservation is being written already")
        word = None if self._network.refuse_begin else self._words.claim(lease.lease_id)
        if word is None:
            raise LeaseError("the receiver does not know the reservation, or it has ended")
        if not self._observer.begin_write(lease):
            self._words.end(lease.lease_id)
            raise LeaseError("the receiver does not know the reservation, or it has ended")
        self._words.grant(lease.lease_id)
        self._writing[lease.lease_id] = (lease, on_stop)
        return LeaseGuard(word, lease.lease_id)

    def _finish(self, lease: Lease, ok: bool) -> None:
        if self._writing.pop(lease.lease_id, None) is None:
            raise LeaseError("the reservation is not being written here")
        self._words.end(lease.lease_id)
        lost = self._network.fail_finish
        counted = self._observer.end_write(lease, ok and not lost)
        if self._retired and not self._writing:
            self.close()
        if lost:
            raise TransferFailed("the receiving engine did not answer")
        if ok and not counted:
            raise LeaseError("the reservation ended before its KV had arrived")


def _page_aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed uint8 [nbytes]."""
    page = 4096
    raw = np.zeros(nbytes + page, np.uint8)
    skip = -raw.ctypes.data % page
    return raw[skip : skip + nbytes]
