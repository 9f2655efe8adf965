"""Helpers of the transport tests: a lease observer that records, and a way to make transports that see each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from microserving.transports import Lease, Transport, create_transport
from microserving.transports.fake import FakeNetwork, FakeTransport

PAGE_BYTES = 4096
PAGES = 8
TIMEOUT_S = 10.0


@dataclass
class RecordingObserver:
    """grant, keep: what it answers. ``events`` holds ("begin", lease) and ("end", lease, ok) in order."""

    grant: bool = True
    keep: bool = True
    events: list[tuple[object, ...]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def begin_write(self, lease: Lease) -> bool:
        self._record("begin", lease)
        return self.grant

    def end_write(self, lease: Lease, ok: bool) -> bool:
        self._record("end", lease, ok)
        return ok and self.keep

    def _record(self, *event: object) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, *event: object, timeout_s: float = TIMEOUT_S) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.events, timeout_s), self.events


@dataclass
class WatchingObserver(RecordingObserver):
    """Notes which lease words hold whenever it is asked or told. on_begin: what happens while it says yes."""

    words: npt.NDArray[np.int64] | None = None
    held: list[list[int]] = field(default_factory=list)
    on_begin: Callable[[Lease], object] = id

    def begin_write(self, lease: Lease) -> bool:
        self._look()
        self.on_begin(lease)
        return super().begin_write(lease)

    def end_write(self, lease: Lease, ok: bool) -> bool:
        self._look()
        return super().end_write(lease, ok)

    def _look(self) -> None:
        assert self.words is not None
        self.held.append(self.words[self.words != 0].tolist())


@dataclass
class World:
    """Transports of one kind that can reach each other; all are closed at the end of a test."""

    name: str
    runtime_dir: Path
    network: FakeNetwork = field(default_factory=FakeNetwork)
    transports: list[Transport] = field(default_factory=list)

    def transport(self) -> Transport:
        if self.name == "fake":
            made: Transport = FakeTransport(network=self.network)
        else:
            made = create_transport(self.name, runtime_dir=self.runtime_dir)
        self.transports.append(made)
        return made

    def receiver(
        self, observer: RecordingObserver, engine_id: str = "d0", epoch: str = "e1", pages: int = PAGES
    ) -> Transport:
        transport = self.transport()
        transport.allocate(pages * PAGE_BYTES)
        transport.serve(engine_id, epoch, pages, observer)
        return transport

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


def lease(number: int = 1, engine_id: str = "d0", epoch: str = "e1") -> Lease:
    return Lease(engine_id, epoch, f"request-{number}", number)


def run_threads(count: int, work: Callable[[int], None]) -> list[BaseException]:
    """Run ``work(i)`` on ``count`` threads at once; what they raised."""
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return failures
