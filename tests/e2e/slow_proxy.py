"""A TCP proxy between a router and an engine that holds one verb's request or answer until it is told to let go.

It forwards bytes as they come and knows of HTTP only the first line of each request and the lines of an event stream.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

HELD_S = 20


@dataclass
class Hold:
    """verb: `prep_recv` and so on. moment: ``asked`` (before the engine hears of it), ``heard`` (the engine has it: not
    held, only told), ``answered`` (before the router hears the answer), or a number n: before the router has the n-th event.
    """

    verb: str
    moment: str | int
    reached: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    def pause(self) -> None:
        self.reached.set()
        self.let_go.wait(HELD_S)


class SlowProxy:
    """``hold`` is looked at for every request; the first one that it fits is held, the others pass."""

    def __init__(self, engine: str) -> None:
        host, _, port = engine.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._open: set[_Link] = set()
        self.hold: Hold | None = None
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Cuts what is open, too."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in list(self._open):
            link.cut()

    def fitting(self, data: bytes) -> Hold | None:
        hold = self.hold
        if hold is None or not data.startswith(f"POST /microserving/{hold.verb} ".encode()):
            return None
        self.hold = None
        return hold

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as engine:
            link = _Link(self, client, engine)
            self._open.add(link)
            answers = threading.Thread(target=link.answers, daemon=True)
            answers.start()
            link.requests()
            answers.join()
            self._open.discard(link)


@dataclass(eq=False)
class _Link:
    """One connection of the router, and the proxy's own to the engine."""

    proxy: SlowProxy
    client: socket.socket
    engine: socket.socket
    held: Hold | None = None

    def requests(self) -> None:
        with suppress(OSError):
            while data := self.client.recv(65536):
                hold = self.proxy.fitting(data)
                self.held = hold or self.held
                if hold is not None and hold.moment == "asked":
                    hold.pause()
                self.engine.sendall(data)
                if hold is not None and hold.moment == "heard":
                    hold.reached.set()
        with suppress(OSError):
            self.engine.shutdown(socket.SHUT_WR)

    def answers(self) -> None:
        events = 0
        with suppress(OSError):
            while data := self.engine.recv(65536):
                hold = self.held
                if hold is not None and not hold.reached.is_set():
                    events += data.count(b"data: ")
                    if hold.moment == "answered" or (isinstance(hold.moment, int) and events >= hold.moment):
                        hold.pause()
                self.client.sendall(data)
        self.cut()

    def cut(self) -> None:
        for end in (self.client, self.engine):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow_proxies(*engines: str) -> Iterator[list[SlowProxy]]:
    """A proxy in front of each engine, on threads of their own."""
    proxies = [SlowProxy(engine) for engine in engines]
    try:
        yield proxies
    finally:
        for proxy in proxies:
            proxy.close()
