"""`microserving up`: from a cluster's file to processes that serve, and back to nothing.

Owns the order of things and the ways out. The launcher itself does no long work: fetching and compiling run in
children, so that a signal ends everything at any moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from microserving.cluster.command_line import to_flags
from microserving.cluster.config import ClusterConfig
from microserving.cluster.processes import ProcessSpec
from microserving.cluster.runtime_dir import runtime_dir, write_card
from microserving.cluster.secret import check_secret, create_secret_file
from microserving.cluster.supervisor import Supervisor
from microserving.cluster.topology import EngineNode, RouterNode, Topology, describe, plan
from microserving.cluster.welcome import welcome
from microserving.errors import StartupError
from microserving.observability.console import Console

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What `microserving up` takes beside the file. log_dir None = inside the runtime directory, removed with it.

    on_ready: given what the ready file says, instead of the user who reads where the cluster is. Must not raise.
    """

    cache_dir: Path | None = None
    log_dir: Path | None = None
    ready_file: Path | None = None
    runtime_base: Path | None = None
    start_timeout_s: float = 900.0
    dry_run: bool = False
    on_ready: Callable[[dict[str, object]], None] | None = None


class Commands:
    """The Python command of each kind of child. Tests give others."""

    def fetch(self, model: str, cache_dir: Path | None) -> tuple[str, ...]:
        cache = () if cache_dir is None else (f"--cache-dir={cache_dir}",)
        return ("-m", "microserving", "model", "fetch", *cache, "--", model)

    def check_program(self, node: RouterNode) -> tuple[str, ...]:
        settings = _set_flags(node)
        prefill, decode = set(node.config.prefill_peers), set(node.config.decode_peers)
        counts = {"prefill": prefill - decode, "decode": decode - prefill, "hybrid": prefill & decode}
        roles = [f"--{role}={len(peers)}" for role, peers in counts.items()]
        return ("-m", "microserving", "program", "check", *roles, *settings, "--", node.config.program)

    def engine(self, node: EngineNode) -> tuple[str, ...]:
        return ("-m", "microserving", "serve", *to_flags(node.config))

    def router(self, node: RouterNode) -> tuple[str, ...]:
        flags = to_flags(node.config, skip={"program_settings"})
        return ("-m", "microserving", "router", *flags, *_set_flags(node))


def _set_flags(node: RouterNode) -> list[str]:
    return [f"--set={key}={json.dumps(value)}" for key, value in node.config.program_settings.items()]


class Launcher:
    """One run of one cluster."""

    def __init__(
        self,
        config: ClusterConfig,
        options: LaunchOptions,
        console: Console,
        commands: Commands | None = None,
    ) -> None:
        self._config = config
        self._options = options
        self._console = console
        self._commands = commands or Commands()
        self._supervisor: Supervisor | None = None

    async def run(self) -> None:
        """Returns only for a dry run; else it is cancelled. Nothing is left behind however it ends.

        Raises StartupError when a process cannot start. After start-up, processes that die are started again.
        """
        with runtime_dir(self._options.runtime_base) as directory:
            topology = self._plan(directory)
            if self._options.dry_run:
                self._show(topology)
                return
            write_card(directory, topology.name, topology.public_url)
            supervisor = self._new_supervisor(directory)
            async with supervisor:
                await self._start(supervisor, topology)
                state = partial(_ready_state, supervisor, topology, directory)
                with self._announced(topology, state):
                    supervisor.keep(partial(self._rewrite, state))
                    await asyncio.Event().wait()  # until cancelled

    def kill(self) -> None:
        """End all processes without grace (the second Ctrl-C)."""
        if self._supervisor is not None:
            self._supervisor.kill()

    def _plan(self, directory: Path) -> Topology:
        named = self._config.cluster.secret_file
        secret_file = create_secret_file(directory) if named is None else Path(named)
        check_secret("cluster", "127.0.0.1", secret_file)
        return plan(
            self._config,
            secret_file=secret_file,
            runtime_dir=directory,
            cache_dir=self._options.cache_dir,
            cpus=sorted(os.sched_getaffinity(0)),
        )

    def _show(self, topology: Topology) -> None:
        sys.stdout.write("".join(f"{line}\n" for line in describe(self._config, topology)))

    def _new_supervisor(self, directory: Path) -> Supervisor:
        log_dir = self._options.log_dir or directory / "logs"
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(f"cannot make the log directory {log_dir}: {error.strerror}") from error
        self._supervisor = Supervisor(
            log_dir=log_dir, console=self._console, start_timeout_s=self._options.start_timeout_s
        )
        return self._supervisor

    async def _start(self, supervisor: Supervisor, topology: Topology) -> None:
        self._console.line(f"cluster {topology.name}: model {topology.model}")
        for line in describe(self._config, topology):
            self._console.detail(line)
        if topology.router is not None:
            check = self._commands.check_program(topology.router)
            await supervisor.run(ProcessSpec("program", check))
        fetch = self._commands.fetch(topology.model, self._options.cache_dir)
        await supervisor.run(ProcessSpec("model", fetch, family=True))
        self._console.line("starting the engines (the first start compiles the model; later ones load it)")
        await supervisor.start([self._engine_spec(node) for node in topology.engines])
        if topology.router is not None:
            await supervisor.start([self._router_spec(topology.router)])

    def _engine_spec(self, node: EngineNode) -> ProcessSpec:
        command = self._commands.engine(node)
        drain_s = node.config.drain_s
        return ProcessSpec(node.config.node_id, command, ready=node.address, cpus=node.cpus, drain_s=drain_s)

    def _router_spec(self, node: RouterNode) -> ProcessSpec:
        drain_s = node.config.shutdown_timeout_s
        return ProcessSpec("router", self._commands.router(node), ready=node.address, drain_s=drain_s)

    @contextmanager
    def _announced(self, topology: Topology, state: Callable[[], dict[str, object]]) -> Iterator[None]:
        """Tell the user, and the ready file, where the cluster is; take the file away at the end."""
        ready_file = self._options.ready_file
        if ready_file is not None:
            _write_whole(ready_file, json.dumps(state(), indent=1))
        try:
            if self._options.on_ready is not None:
                self._options.on_ready(state())
            else:
                for line in welcome(topology):
                    self._console.line(line)
            yield
        finally:
            if ready_file is not None:
                ready_file.unlink(missing_ok=True)

    def _rewrite(self, state: Callable[[], dict[str, object]]) -> None:
        """A process was started again: the ready file has another pid. The cluster goes on without it if need be."""
        if self._options.ready_file is None:
            return
        try:
            _write_whole(self._options.ready_file, json.dumps(state(), indent=1))
        except StartupError as error:
            self._console.line(error.message)


def run_cluster(
    config: ClusterConfig, options: LaunchOptions, console: Console, commands: Commands | None = None
) -> int:
    """Run until SIGINT, SIGTERM or SIGHUP; the exit status is 0 then. Raises StartupError."""
    return asyncio.run(_run_until_signal(Launcher(config, options, console, commands), console))


async def _run_until_signal(launcher: Launcher, console: Console) -> int:
    """A first signal ends the cluster in order, when what runs has finished or had its time; a second one at once."""
    task = asyncio.ensure_future(launcher.run())
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if stopping:
            launcher.kill()
        else:
            stopping = True
            console.line("stopping: running requests may finish; Ctrl-C again ends at once")
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()  # raises what ended it
    return 0


def _ready_state(supervisor: Supervisor, topology: Topology, directory: Path) -> dict[str, object]:
    """For tests and tools."""
    return {
        "url": topology.public_url,
        "launcher_pid": os.getpid(),
        "pids": supervisor.pids(),
        "nodes": {node.config.node_id: node.address.url for node in topology.engines},
        "program": None if topology.router is None else topology.router.config.program,
        "admin": None if topology.router is None else str(topology.router.config.admin_socket),
        "runtime_dir": str(directory),
    }


def _write_whole(path: Path, text: str) -> None:
    """A reader sees the whole file or none. Raises StartupError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from error
