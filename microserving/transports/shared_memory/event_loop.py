"""One thread that waits for many file descriptors. Knows nothing of sockets, leases or memory."""

from __future__ import annotations

import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class EventLoop:
    """Runs callbacks on one thread, all of them short. ``watch`` and ``forget`` are for that thread only."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, READ, self._woken)
        self._posted: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # guards _closed and the life of _wake_fd
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, action: Callable[[], None]) -> bool:
        """Run ``action`` on the loop thread soon. Any thread. False = the loop is closed and will not."""
        with self._lock:
            if self._closed:
                return False
            self._posted.append(action)
            os.eventfd_write(self._wake_fd, 1)
            return True

    def call(self, action: Callable[[], None]) -> None:
        """Run ``action`` on the loop thread and wait until it has run. On a closed loop it runs here."""
        if threading.current_thread() is self._thread:
            action()
            return
        done = threading.Event()

        def run() -> None:
            try:
                action()
            finally:
                done.set()

        if self.post(run):
            done.wait()
        else:
            self._thread.join()
            action()

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call ``callback(ready events)`` when ``fd`` is ready; replaces an earlier watch. Nothing on a closed loop."""
        if self._wake_fd < 0:
            return
        if self._watched(fd):
            self._selector.modify(fd, events, callback)
        else:
            self._selector.register(fd, events, callback)

    def forget(self, fd: int) -> None:
        """Stop watching. Before ``fd`` is closed. Idempotent."""
        if self._watched(fd):
            self._selector.unregister(fd)

    def _watched(self, fd: int) -> bool:
        watched = self._selector.get_map()
        return watched is not None and fd in watched  # None once the selector is closed

    def close(self) -> None:
        """Run what was posted, then end the thread. Idempotent; not from the loop thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        with self._lock:
            if self._wake_fd >= 0:
                self._selector.close()
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _run(self) -> None:
        while not (self._closed and not self._posted):
            for key, events in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:  # an earlier callback may have forgotten it
                    self._guarded(key, events)

    def _guarded(self, key: selectors.SelectorKey, events: int) -> None:
        try:
            key.data(events)
        except Exception:  # noqa: BLE001 - a bug in one callback must not stop every other writer
            _log.exception("transport callback failed")
            if key.fd != self._wake_fd:
                self.forget(key.fd)

    def _woken(self, _: int) -> None:
        os.eventfd_read(self._wake_fd)
        for _ in range(len(self._posted)):
            action = self._posted.popleft()
            try:
                action()
            except Exception:  # noqa: BLE001 - as above
                _log.exception("posted transport action failed")
