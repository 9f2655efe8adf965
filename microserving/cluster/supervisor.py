"""All children of the launcher: starts them, restarts those that die later, ends them together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

from microserving.cluster.processes import Child, ProcessSpec
from microserving.errors import StartupError
from microserving.observability.console import Console

STOP_GRACE_S = 3.0
FIRST_STOP_S = 1.0
"""What was started last uses the others (a router its engines): it gets ``drain_s`` and so long alone to end before they
are told."""
FIRST_RESTART_S = 0.5
LONGEST_RESTART_S = 30.0
STABLE_AFTER_S = 60.0
"""A process that ran for so long starts again with the shortest delay."""


class Supervisor:
    """An async context: leaving it, for whatever reason, leaves no process. Used on the main thread only.

    (The kernel ends a child when the *thread* that started it ends.)
    """

    def __init__(self, *, log_dir: Path, console: Console, start_timeout_s: float) -> None:
        self._log_dir = log_dir
        self._console = console
        self._start_timeout_s = start_timeout_s
        self._children: dict[str, Child] = {}
        self._last_started: frozenset[str] = frozenset()
        self._keepers: set[asyncio.Task[None]] = set()
        self._lifeline: tuple[int, int] = (-1, -1)
        self._on_restart: Callable[[], None] = _nothing

    async def __aenter__(self) -> Supervisor:
        self._lifeline = os.pipe()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stop()
        finally:
            for descriptor in self._lifeline:
                os.close(descriptor)

    def pids(self) -> dict[str, int]:
        """Name -> pid of each running process."""
        return {name: child.pid for name, child in self._children.items() if child.pid is not None}

    async def run(self, spec: ProcessSpec) -> None:
        """Run a program to its end. Raises StartupError when it fails."""
        child = self._new(spec)
        await child.start()
        status = await child.wait()
        if status != 0:
            child.show_tail()
            raise StartupError(child.reason or child.describe_end(status))
        del self._children[spec.name]

    async def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Start processes and wait until all are ready. Raises StartupError as soon as one ends."""
        self._last_started = frozenset(spec.name for spec in specs)
        children = [self._new(spec) for spec in specs]
        for child in children:
            await child.start()
        waiting = [asyncio.create_task(self._first_ready(child)) for child in children]
        try:
            await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()

    def keep(self, on_restart: Callable[[], None]) -> None:
        """From now on restart every process that ends. on_restart: called when ``pids`` has changed; never raises."""
        self._on_restart = on_restart
        for child in self._children.values():
            task = asyncio.create_task(self._keep(child), name=f"keep-{child.spec.name}")
            self._keepers.add(task)

    def kill(self) -> None:
        """SIGKILL to all, now. The context still has to be left."""
        for child in self._children.values():
            child.kill()

    def _new(self, spec: ProcessSpec) -> Child:
        child = Child(spec, log_dir=self._log_dir, lifeline=self._lifeline[0], console=self._console)
        self._children[spec.name] = child
        return child

    async def _first_ready(self, child: Child) -> None:
        try:
            await child.wait_ready(self._start_timeout_s)
        except StartupError:
            child.show_tail()
            raise
        self._console.line(f"{child.spec.name}: ready after {child.uptime_s:.1f} s")

    async def _keep(self, child: Child) -> None:
        delay = FIRST_RESTART_S
        while True:
            status = await child.wait()
            if child.uptime_s > STABLE_AFTER_S:
                delay = FIRST_RESTART_S
            self._console.line(f"{child.describe_end(status)}; starting it again in {delay:g} s")
            child.show_tail()
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_RESTART_S)
            await self._restart(child)

    async def _restart(self, child: Child) -> None:
        try:
            await child.start()
            self._on_restart()
            await child.wait_ready(self._start_timeout_s)
        except StartupError:
            child.kill()  # one that hangs; ``_keep`` reports how it ended
        else:
            self._console.line(f"{child.spec.name}: ready again after {child.uptime_s:.1f} s")

    async def _stop(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        last = {name: child for name, child in self._children.items() if name in self._last_started}
        ends = _terminate(last.values())
        if ends:
            drain_s = max(child.spec.drain_s for child in last.values())
            await asyncio.wait(ends, timeout=drain_s + min(FIRST_STOP_S, STOP_GRACE_S))
        ends |= _terminate(child for name, child in self._children.items() if name not in last)
        if not ends:
            return
        _, late = await asyncio.wait(ends, timeout=STOP_GRACE_S)
        if late:
            self.kill()
            await asyncio.wait(late)


def _terminate(children: Iterable[Child]) -> set[asyncio.Future[int]]:
    """Tell them to end. Returns their ends."""
    ends: set[asyncio.Future[int]] = set()
    for child in children:
        child.terminate()
        ends.add(asyncio.ensure_future(child.wait()))
    return ends


def _nothing() -> None:
    """The listener when nobody listens."""
