"""Clusters that the bench starts itself, each in the processes of its own that `microserving up` would start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microserving.bench.targets import Program
from microserving.cluster.config import ClusterConfig, Setting
from microserving.cluster.launcher import Launcher, LaunchOptions
from microserving.observability.console import Console
from microserving.router.program_loader import load_source, read_program


@dataclass(frozen=True, slots=True)
class Started:
    """A cluster that runs. url: where clients go; admin: the router's admin socket, if it has one."""

    url: str
    admin: str | None


@asynccontextmanager
async def started(
    config: ClusterConfig, console: Console, *, cache_dir: Path | None = None
) -> AsyncIterator[Started]:
    """It runs while the block does, on a free port. Raises StartupError when it cannot start."""
    ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    options = LaunchOptions(cache_dir=cache_dir, on_ready=ready.set_result)
    launcher = Launcher(config.with_overrides(port=0), options, console)
    running = asyncio.create_task(launcher.run(), name=f"cluster-{config.cluster.name}")
    try:
        either: list[asyncio.Future[Any]] = [running, ready]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        state = ready.result()
        yield Started(str(state["url"]), state["admin"])
    finally:
        running.cancel()
        await asyncio.wait({running})


def program_of(name: str, settings: Mapping[str, Setting]) -> Program:
    """A shipped program's name or a file, to be deployed. Raises ProgramError, also for what a router would refuse of the
    settings: before clusters start."""
    source = read_program(name)
    load_source(source, settings)
    return Program(source.path.stem, settings, source.deployment(settings))
