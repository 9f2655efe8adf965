"""TCP proxies between a router and its engines that can do something at an exact point of a request.

They forward bytes as they come and know of HTTP only the head of each request and the lines of an event stream.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Moment = Literal["asked", "heard", "answered"] | int
_LENGTH: Final = re.compile(rb"content-length: (\d+)")


@dataclass(eq=False)
class Trigger:
    """Once, at the first request for ``verb`` of at least ``length`` bytes at one of ``proxies``: ``act``, on a thread.

    moment: ``asked`` (the engine hears of the request when ``act`` has returned), ``heard`` (it has heard, and works
    meanwhile), ``answered`` (the router hears the answer when ``act`` has returned), or n: the same behind n events.
    act: gets the proxy. done: it has ended; struck: without an error.
    """

    verb: str
    moment: Moment
    proxies: list[FaultProxy]
    act: Callable[[FaultProxy], None]
    length: int = 0
    fired: bool = False
    struck: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def fits(self, proxy: FaultProxy, data: bytes) -> bool:
        if proxy not in self.proxies or not data.startswith(f"POST /microserving/{self.verb} ".encode()):
            return False
        length = _LENGTH.search(data)
        return length is not None and int(length[1]) >= self.length

    async def fire(self, proxy: FaultProxy) -> None:
        """The first time; another request that comes here meanwhile waits too."""
        if not self.fired:
            self.fired = True
            try:
                await asyncio.to_thread(self.act, proxy)
                self.struck = True
            finally:
                self.done.set()
        elif self.moment != "heard":
            await asyncio.to_thread(self.done.wait)


@dataclass(eq=False)
class _Connection:
    """watched: the trigger that the request under way fits; events: of its answer."""

    writers: list[asyncio.StreamWriter]
    watched: Trigger | None = None
    events: int = 0


class FaultProxy:
    """trigger: looked at for every request. delay_s: of every piece, in both directions."""

    def __init__(self, name: str, engine: str) -> None:
        self.name = name
        self.engine = engine
        self.url = ""
        self.trigger: Trigger | None = None
        self.delay_s = 0.0
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> asyncio.Server:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    def cut(self) -> None:
        """Break all connections. From any thread."""
        cut = threading.Event()

        def abort() -> None:
            self._abort()
            cut.set()

        self._loop.call_soon_threadsafe(abort)
        assert cut.wait(10)

    async def close(self) -> None:
        """Break all connections and wait for their ends. On the proxy's loop."""
        self._abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)

    def _abort(self) -> None:
        for connection in self._connections:
            for writer in connection.writers:
                writer.transport.abort()

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._keep(task)
        host, _, port = self.engine.removeprefix("http://").rpartition(":")
        try:
            engine, forth = await asyncio.open_connection(host, int(port))
        except OSError:
            back.transport.abort()
            return
        connection = _Connection([back, forth])
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(client, forth, connection))
                group.create_task(self._answers(engine, back, connection))
        finally:
            self._connections.discard(connection)
            for writer in connection.writers:
                writer.close()

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection
    ) -> None:
        while data := await _read(reader):
            trigger = self.trigger
            if data.startswith((b"POST ", b"GET ")):
                connection.watched, connection.events = None, 0
            if trigger is not None and trigger.fits(self, data):
                connection.watched = trigger
                if trigger.moment == "asked":
                    await trigger.fire(self)
            await asyncio.sleep(self.delay_s)
            await _write(writer, data)
            if trigger is not None and connection.watched is trigger and trigger.moment == "heard":
                self._keep(self._loop.create_task(trigger.fire(self)))
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()

    async def _answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection
    ) -> None:
        while data := await _read(reader):
            trigger = connection.watched
            if trigger is not None:
                connection.events += data.count(b"data: ")
                reached = isinstance(trigger.moment, int) and connection.events >= trigger.moment
                if reached or trigger.moment == "answered":
                    connection.watched = None
                    await trigger.fire(self)
            await asyncio.sleep(self.delay_s)
            await _write(writer, data)
        writer.close()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(65536)
    except OSError:
        return b""


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """What the other side does not want any more is lost; that it left is seen by who reads."""
    try:
        writer.write(data)
        await writer.drain()
    except OSError:
        return


@contextmanager
def fault_proxies(engines: dict[str, str]) -> Iterator[dict[str, FaultProxy]]:
    """A proxy in front of each engine (name -> URL), all on a thread of their own."""
    proxies = {name: FaultProxy(name, url) for name, url in engines.items()}
    started, ended = threading.Event(), threading.Event()

    async def main() -> None:
        servers = [await proxy.start() for proxy in proxies.values()]
        started.set()
        await asyncio.to_thread(ended.wait)
        for server in servers:
            server.close()
        for proxy in proxies.values():
            await proxy.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield proxies
    finally:
        ended.set()
        thread.join(60)
