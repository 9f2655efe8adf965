"""The process that tries programs for the router, which must not fork itself: started at the first deployment, used
again for the next ones.

    python -P -m microserving.router.dry_run_helper     one JSON job a line on stdin, one JSON answer a line on stdout

Owns the helper process and both ends of its pipes; what a trial is, only ``dry_run`` knows.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from microserving.errors import ProgramError
from microserving.router.dry_run import DryRun, ProgramFacts, Roles, dry_run
from microserving.router.program_loader import ProgramSource

_START_S = 30.0
"""How long the helper may take to start, on top of a trial's own time."""
IDLE_S = 60.0
"""A helper that was not asked for so long is ended; the next trial starts another one."""
_MAX_LINE_BYTES = 2**24
_COMMAND = ("-P", "-m", "microserving.router.dry_run_helper")


class DryRunHelper:
    """Trials one after the other. Bound to one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def dry_run(self, job: DryRun) -> ProgramFacts:
        """As ``dry_run.dry_run``, without blocking. Cancelled: the helper is ended, and with it the trial."""
        async with self._lock:
            await self._stop_waiting()
            try:
                async with asyncio.timeout(job.timeout_s + _START_S):
                    answer = await self._ask(_to_json(job))
            except BaseException as error:
                await self._end()
                if isinstance(error, (TimeoutError, OSError, EOFError)):
                    raise job.source.fault(1, "the program ended the process that tried it") from error
                raise
            self._idle = asyncio.create_task(self._end_when_idle(), name="dry-run-idle")
        if "error" in answer:
            raise ProgramError(answer["error"], param=answer["param"])
        return ProgramFacts(**answer["facts"])

    async def close(self) -> None:
        """Idempotent."""
        async with self._lock:
            await self._stop_waiting()
            await self._end()

    async def _end_when_idle(self) -> None:
        await asyncio.sleep(IDLE_S)
        await self._end()

    async def _stop_waiting(self) -> None:
        """Call with the lock; when the helper is just being ended, that is waited for."""
        if self._idle is not None:
            self._idle.cancel()
            await asyncio.wait([self._idle])
            self._idle = None

    async def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *_COMMAND,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_LINE_BYTES,
                env=_environment(),
                start_new_session=True,  # Ctrl-C in the terminal is the router's
            )
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


def _environment() -> dict[str, str]:
    """Ours, with the same modules to be found."""
    paths = [path or os.getcwd() for path in sys.path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _to_json(job: DryRun) -> dict[str, Any]:
    source = {"path": str(job.source.path), "text": base64.b64encode(job.source.text).decode()}
    rest = {"settings": job.settings, "roles": asdict(job.roles), "timeout_s": job.timeout_s}
    return {"source": source} | rest


def _from_json(job: dict[str, Any]) -> DryRun:
    source = ProgramSource(Path(job["source"]["path"]), base64.b64decode(job["source"]["text"]))
    return DryRun(source, job["settings"], Roles(**job["roles"]), job["timeout_s"])


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"facts": asdict(dry_run(_from_json(job)))}
    except ProgramError as error:
        return {"error": error.message, "param": error.param}


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Answer every job, until there are no more (the router is gone)."""
    for line in jobs:
        answers.write(json.dumps(_answer(json.loads(line))).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
