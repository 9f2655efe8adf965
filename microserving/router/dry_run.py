"""Tries a router program before it gets requests: loads it and routes some prompts over engines in memory, in a
process of its own that can be ended whatever the program does.

Owns the child process, its limits, and what is said of a program that hangs or ends it. Blocking and for processes
with one thread, as it forks; the router asks a helper (``dry_run_helper``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, NoReturn

from microserving.errors import ProgramError
from microserving.program import Chunks, GenerationChunk, setting_types
from microserving.program.testing import FakeCluster, FakeEngine, make_request
from microserving.router.program_loader import LoadedProgram, ProgramSource, load_source

PROMPT_LENGTHS = (1, 2, 17, 300)
"""In tokens: the shortest there are, and some that policies tell apart."""
MAX_DATA_BYTES = 2 * 2**30
"""What the child may allocate."""
_MAX_MESSAGE_CHARS = 1000
_MAX_VALUE_CHARS = 1000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_GRACE_S = 0.5
"""How long the child may take to say that its time is over."""


@dataclass(frozen=True, slots=True)
class Roles:
    """How many engines of each role the cluster has."""

    prefill: int = 1
    decode: int = 1
    hybrid: int = 0

    def cluster(self) -> FakeCluster:
        """Such a cluster in memory."""
        cluster = FakeCluster(prefill=self.prefill, decode=self.decode + self.hybrid)
        for number in range(self.decode, self.decode + self.hybrid):
            cluster[f"decode-{number}"].role = "hybrid"
        return cluster


@dataclass(frozen=True, slots=True)
class DryRun:
    """What to try, over which engines. timeout_s: for all of it."""

    source: ProgramSource
    settings: dict[str, Any]
    roles: Roles = Roles()
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What is known of a program that passed. name: of its class. settings: their values, as text where JSON has none, or
    too much."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


def dry_run(job: DryRun) -> ProgramFacts:
    """Fork, try, and leave no process. Raises ProgramError, ``file:line: ...``, when the program must not serve."""
    read_end, write_end = os.pipe()
    deadline = time.monotonic() + job.timeout_s + _GRACE_S
    child = os.fork()
    if child == 0:
        _be_child(job, write_end)
    os.close(write_end)
    line = b""
    try:
        line = _read_line(read_end, deadline)
        ended = bool(line) or _has_ended(child, deadline)
    finally:
        os.close(read_end)
        status = _end(child)
    return _facts(line, job, status if ended else None)


def _read_line(descriptor: int, deadline: float) -> bytes:
    """What the child wrote: one line when it could say anything. Not until its end: its own children may live on."""
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(descriptor, 65536) if _readable(descriptor, deadline) else b""
        if not piece:
            return b""
        data += piece
    return data


def _has_ended(child: int, deadline: float) -> bool:
    """Whether the child ends by itself until ``deadline``."""
    process = os.pidfd_open(child)
    try:
        return _readable(process, deadline)
    finally:
        os.close(process)


def _end(child: int) -> int:
    """Leave no process. Returns the exit status (negative: the signal)."""
    for kill in (os.killpg, os.kill):  # what it started goes with it; it may not lead its group yet
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _readable(descriptor: int, deadline: float) -> bool:
    """Wait until there is something to read, or ``deadline`` (``time.monotonic``) has passed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _facts(line: bytes, job: DryRun, status: int | None) -> ProgramFacts:
    if not line:
        reason = _hung(job) if status is None else f"ended the process it was tried in ({_described(status)})"
        raise job.source.fault(1, f"the program {reason}")
    answer = json.loads(line)
    if (error := answer.get("error")) is not None:
        raise ProgramError(error, param=answer["param"])
    return ProgramFacts(**answer["facts"])


def _described(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def _hung(job: DryRun) -> str:
    return f"is not done after {job.timeout_s:g} s, on engines that answer at once"


def _be_child(job: DryRun, answers_to: int) -> NoReturn:
    exit_now = os._exit
    try:
        os.setpgid(0, 0)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # nobody would end us any more
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        _limit(job)
        gc.freeze()  # what is collected between requests is the program's
        _Child(job, answers_to, exit_now).run()
    finally:
        exit_now(1)


def _limit(job: DryRun) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    seconds = int(job.timeout_s + _GRACE_S) + 2  # the last resort
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


class _Child:
    """The trial inside its process. Ends the process with an answer, whatever the program does."""

    def __init__(self, job: DryRun, answers_to: int, exit_now: Any) -> None:
        self._job = job
        self._answers_to = answers_to
        self._exit_now = exit_now
        self._trial = Trial(job)

    def run(self) -> None:
        signal.signal(signal.SIGALRM, self._out_of_time)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, self._job.timeout_s)
        vars(os)["_exit"] = self._program_exits  # so that the line can be told
        try:
            facts = self._trial.run()
        except ProgramError as error:
            self._refuse(error)
        except BaseException as error:  # noqa: BLE001 - the wall: a program may raise anything
            self._refuse(self._job.source.failure(error, fallback=1))
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._answer({"facts": asdict(facts)})

    def _out_of_time(self, _number: int, frame: FrameType | None) -> None:
        line = line_on_stack(frame, str(self._job.source.path)) or self._trial.waits_at() or 1
        self._refuse(self._job.source.fault(line, f"the program {_hung(self._job)}"))

    def _program_exits(self, status: int) -> None:
        line = line_on_stack(sys._getframe(1), str(self._job.source.path)) or 1
        self._refuse(self._job.source.fault(line, f"os._exit({status!r}) would end the router"))

    def _refuse(self, error: ProgramError) -> None:
        self._answer({"error": error.message[:_MAX_MESSAGE_CHARS], "param": error.param})

    def _answer(self, answer: dict[str, Any]) -> None:
        os.write(self._answers_to, json.dumps(answer).encode() + b"\n")
        self._exit_now(0)


class Trial:
    """Loads the program and lets it route, in this process."""

    def __init__(self, job: DryRun) -> None:
        self._job = job
        self._route: Chunks | None = None

    def run(self) -> ProgramFacts:
        """Raises ProgramError, or whatever the program raises where it must not raise anything."""
        program = load_source(self._job.source, self._job.settings)
        asyncio.run(self._serve(program))
        cls = type(program.instance)
        return ProgramFacts(
            cls.__name__, {name: _told(getattr(program.instance, name)) for name in setting_types(cls)}
        )

    def waits_at(self) -> int | None:
        """The line of the program at which the request that runs now waits."""
        return line_awaited(self._route, str(self._job.source.path))

    async def _serve(self, program: LoadedProgram) -> None:
        cluster = self._job.roles.cluster()
        plan = asyncio.create_task(program.instance.plan(cluster))
        await asyncio.sleep(0)
        for matched in (0, max(PROMPT_LENGTHS)):
            for engine in cluster.engines.values():
                engine.matched = matched
            for length in PROMPT_LENGTHS:
                await self._request(program, cluster, length, f"dry-run-{matched}-{length}")
        if plan.done() and not plan.cancelled() and (error := plan.exception()) is not None:
            raise self._job.source.failure(error, fallback=program.line)
        plan.cancel()

    async def _request(
        self, program: LoadedProgram, cluster: FakeCluster, length: int, request_id: str
    ) -> None:
        request = make_request(range(length), request_id=request_id)
        with _NotAwaited(self._job.source) as not_awaited:
            try:
                self._route = program.instance.route(request, cluster)
                await self._route_to_end(program, self._route)
                fault = None
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the wall, as above
                fault = self._fault(program, error, length)
            finally:
                self._route = None
            gc.collect()
        for engine in cluster.engines.values():  # the host frees what a program leaves
            await FakeEngine.abort(engine, request)
        if (fault := not_awaited.fault or fault) is not None:
            raise fault

    async def _route_to_end(self, program: LoadedProgram, route: Chunks) -> None:
        finished = False
        line = program.line
        async for chunk in route:
            line = getattr(getattr(route, "ag_frame", None), "f_lineno", line)
            if not isinstance(chunk, GenerationChunk):
                raise self._job.source.fault(
                    line, f"route yielded a {type(chunk).__name__}, not a GenerationChunk"
                )
            if finished:
                raise self._job.source.fault(line, "route went on after the last chunk")
            finished = chunk.finish_reason is not None
        if not finished:
            raise self._job.source.fault(line, "route ended without a last chunk (one with a finish_reason)")

    def _fault(self, program: LoadedProgram, error: BaseException, length: int) -> ProgramError:
        if isinstance(error, ProgramError):
            return error
        found = self._job.source.failure(error, fallback=program.line)
        error.__traceback__ = None  # lets go of what the frames hold
        tokens = "one token" if length == 1 else f"{length} tokens"
        return ProgramError(f"{found.message} (dry run: a prompt of {tokens})")


def _told(value: object) -> object:
    """A setting's value as it is told to whoever asks."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        value = text = repr(value)
    return value if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


class _NotAwaited:
    """Notices coroutines of the engines that were made and never awaited. fault: the first one, once left."""

    def __init__(self, source: ProgramSource) -> None:
        self.fault: ProgramError | None = None
        self._source = source
        self._warnings = warnings.catch_warnings(record=True)
        self._caught: list[warnings.WarningMessage] | None = None

    def __enter__(self) -> _NotAwaited:
        sys.set_coroutine_origin_tracking_depth(4)
        self._caught = self._warnings.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *exception: object) -> None:
        self._warnings.__exit__(None, None, None)
        own = re.compile(rf'File "{re.escape(str(self._source.path))}", line (\d+)')
        for warning in self._caught or ():
            text = str(warning.message)
            lines = own.findall(text)
            if "was never awaited" in text and lines:
                name = text.split("'")[1].rpartition(".")[2]
                self.fault = self._source.fault(int(lines[-1]), f"{name} is called without await")
                return


def line_on_stack(frame: FrameType | None, filename: str) -> int | None:
    """The innermost line of ``filename`` that runs in ``frame`` or below."""
    for caller, line in traceback.walk_stack(frame):
        if caller.f_code.co_filename == filename:
            return line
    return None


def line_awaited(awaitable: Any, filename: str) -> int | None:
    """The innermost line of ``filename`` at which a suspended coroutine or generator waits."""
    line = None
    while awaitable is not None:
        frame = getattr(awaitable, "ag_frame", None) or getattr(awaitable, "cr_frame", None)
        if frame is not None and frame.f_code.co_filename == filename:
            line = frame.f_lineno
        awaitable = getattr(awaitable, "ag_await", None) or getattr(awaitable, "cr_await", None)
    return line
