"""One child process: start it tied to our life, read its output, see when it is ready, end it.

Owns the process, its log file and its last lines. Does not know what the program does.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import httpx

from microserving.cluster.addresses import Address
from microserving.errors import StartupError
from microserving.observability.console import Console, parse_progress

ERROR_PREFIX = "microserving: error: "
"""How a process's last line starts when it could not start: the rest is the reason."""

_WARNING = re.compile(r"^\S+ (?:\S+ )?(?:WARNING|ERROR|CRITICAL) ")
_TAIL_LINES = 20
_MAX_LINE = 16384
_MAX_LOG_BYTES = 16 * 2**20
_PROBE_TIMEOUT_S = 5.0
_FIRST_PROBE_S = 0.05
_SLOWEST_PROBE_S = 0.5


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """command: `-m MODULE ARGS` or `FILE ARGS` for Python. ready: answers GET /ready with 200 when it serves.

    family: it starts processes of its own. drain_s: how long what it does may go on when it is told to end.
    """

    name: str
    command: tuple[str, ...]
    ready: Address | None = None
    cpus: frozenset[int] = frozenset()
    family: bool = False
    drain_s: float = 0.0


class Child:
    """A process that may be started again after it ended. Used on one event loop, on the main thread."""

    def __init__(self, spec: ProcessSpec, *, log_dir: Path, lifeline: int, console: Console) -> None:
        """lifeline: the read end of a pipe whose write end only this process holds."""
        self.spec = spec
        self._log = LogFile(log_dir / f"{spec.name}.log")
        self._lifeline = lifeline
        self._console = console
        self._process: asyncio.subprocess.Process | None = None
        self._exited: asyncio.Task[int] | None = None
        self._tail: deque[tuple[str, bool]] = deque(maxlen=_TAIL_LINES)
        self._started_at = 0.0

    @property
    def pid(self) -> int | None:
        """Of the running process, else None."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        return self._exited is not None and not self._exited.done()

    @property
    def uptime_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started_at

    async def start(self) -> None:
        """Raises StartupError when the machine gives no process."""
        self._tail.clear()
        self._started_at = time.monotonic()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *_python_command(self.spec),
                stdin=self._lifeline,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise StartupError(f"{self.spec.name}: cannot start a process: {error.strerror}") from error
        self._exited = asyncio.create_task(self._run(self._process), name=f"child-{self.spec.name}")

    async def wait(self) -> int:
        """The exit status (negative: the signal); its output has been read. Cancelling does not end the process."""
        if self._exited is None:
            return 0
        return await asyncio.shield(self._exited)

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises StartupError at once when the process ends, and after ``timeout_s``."""
        if self._exited is None or self.spec.ready is None:
            return
        delay = _FIRST_PROBE_S
        deadline = time.monotonic() + timeout_s
        while not await probe_ready(self.spec.ready) or self._exited.done():
            await asyncio.wait({self._exited}, timeout=delay)
            if self._exited.done():
                raise StartupError(self.describe_end(self._exited.result()))
            if time.monotonic() > deadline:
                raise StartupError(f"{self.spec.name} is not ready after {timeout_s:g} s")
            delay = min(delay * 1.5, _SLOWEST_PROBE_S)

    def terminate(self) -> None:
        """SIGTERM to the process and what it started."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the process and what it started."""
        self._signal(signal.SIGKILL)

    @property
    def reason(self) -> str | None:
        """What it said itself of why it could not go on."""
        reasons = [line for line, _ in self._tail if line.startswith(ERROR_PREFIX)]
        return reasons[-1].removeprefix(ERROR_PREFIX) if reasons else None

    def describe_end(self, status: int) -> str:
        """One line: how it ended, and the reason that it gave itself."""
        if self.reason is not None:
            return f"{self.spec.name}: {self.reason}"
        if status < 0:
            return f"{self.spec.name} was killed by {signal.Signals(-status).name}"
        return f"{self.spec.name} ended with status {status}"

    def show_tail(self) -> None:
        """Write its last lines to the terminal, unless it gave a reason in one line."""
        if self.reason is not None:
            return
        for line, shown in self._tail:
            if not shown:
                self._console.line(f"  {self.spec.name}: {line}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return  # ended meanwhile

    async def _run(self, process: asyncio.subprocess.Process) -> int:
        """Read the output until the process ended."""
        output = asyncio.create_task(self._read_output(process), name=f"output-{self.spec.name}")
        try:
            status = await process.wait()
            await asyncio.wait({output}, timeout=1.0)  # what it started may still hold the pipe
            return status
        finally:
            output.cancel()

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        rest = ""
        while data := await process.stdout.read(65536):
            *lines, rest = (rest + decoder.decode(data)).replace("\r", "\n").split("\n")
            if len(rest) > _MAX_LINE:
                lines, rest = [*lines, rest], ""
            for line in lines:
                self._take_line(line)
        if rest:
            self._take_line(rest)

    def _take_line(self, line: str) -> None:
        progress = parse_progress(line)
        if progress is not None:
            self._console.progress(f"{self.spec.name}: {progress[0]}", progress[1])
            return
        self._log.write(line)
        shown = self._console.verbose or _WARNING.match(line) is not None
        self._tail.append((line, shown))
        if shown:
            self._console.line(f"{self.spec.name}: {line}")


class LogFile:
    """Appends lines. At 16 MiB the file becomes ``NAME.1`` (replacing the one before) and a new one begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size if path.exists() else 0

    def write(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        try:
            if self._size + len(data) > _MAX_LOG_BYTES:
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._size = 0
            with self.path.open("ab") as file:
                file.write(data)
        except OSError:
            return  # a full disk must not end the cluster
        self._size += len(data)


async def probe_ready(address: Address) -> bool:
    """Whether GET /ready there answers 200 within 5 s."""
    try:
        # Our own process on this machine: no proxy, and no certificates to load.
        async with (
            asyncio.timeout(_PROBE_TIMEOUT_S),
            httpx.AsyncClient(trust_env=False, verify=False, timeout=None) as client,
        ):
            answer = await client.get(f"{address.url}/ready")
    except (httpx.HTTPError, TimeoutError):
        return False
    return answer.status_code == 200


def _python_command(spec: ProcessSpec) -> list[str]:
    command = [sys.executable, "-P", "-m", "microserving.cluster.child"]
    if spec.family:
        command.append("--family")
    if spec.cpus:
        command += ["--cpus", ",".join(str(cpu) for cpu in sorted(spec.cpus))]
    return [*command, *spec.command]


def _environment() -> dict[str, str]:
    """Ours, with this very package first on the path (the current directory is not on it: ``-P``)."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
