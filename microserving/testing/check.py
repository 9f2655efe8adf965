"""Which runs a program has to stand: every await with every fault, clients that leave, pairs of faults, crowds.

Owns the plan of the runs; one run is ``trial``'s, its judgement ``verdict``'s.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from microserving.errors import ProgramError
from microserving.program import Program
from microserving.protocol.generation import GenerationRequest, SamplingParams, StopParams
from microserving.router.program_loader import LoadedProgram, load_program
from microserving.testing.engines import EngineSettings
from microserving.testing.faults import CLIENT_FAULTS, ENGINE_FAULTS, Fault, Moment, PlannedFault, may_happen
from microserving.testing.report import Report
from microserving.testing.trial import Outcome, Scene, Trial
from microserving.testing.verdict import judge
from microserving.testing.virtual_time import run_virtual

ALL_FAULTS: tuple[Fault, ...] = ENGINE_FAULTS + CLIENT_FAULTS
DEADLINE_S = 30.0
_PROMPT = 300
_CACHED = 240
_CROWD = (1, 17, 100, 300)
_OUTPUT_TOKENS = 6
_FREE_CALLS = 20
"""Verbs that any program may call, beside ten times as many as without a fault."""

Progress = Callable[[int, int], None]
"""Called with (runs done, runs planned)."""


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """cluster: how many prefill, decode and hybrid engines. requests: what is served in the runs with one request, one
    after the other; each gets a deadline. faults: which ones are tried. pairs, crowds: runs with two faults, and with
    several requests at once. seed: of what is drawn. engines: their sizes and latencies."""

    cluster: tuple[int, int, int] = (2, 2, 0)
    requests: tuple[GenerationRequest, ...] = ()
    faults: tuple[Fault, ...] = ALL_FAULTS
    pairs: int = 40
    crowds: int = 30
    seed: int = 0
    engines: EngineSettings = field(default_factory=EngineSettings)


def check_program(
    program: str | Path | type[Program],
    *,
    settings: Mapping[str, object] | None = None,
    cluster: tuple[int, int] | tuple[int, int, int] = (2, 2, 0),
    requests: Sequence[GenerationRequest] = (),
    faults: Collection[Fault] = ALL_FAULTS,
    pairs: int = 40,
    crowds: int = 30,
    seed: int = 0,
    engines: EngineSettings | None = None,
    progress: Progress | None = None,
) -> Report:
    """Run a program with a fault, or a client that leaves, at every await; see ``CheckSettings`` for the arguments.

    program: a file, the name of a shipped program, or a Program class. settings: the program's. It is first run without a
    fault; when that fails, there are no other runs. Every run is virtual, and the same each time for the same ``seed``.
    A program that computes for ever without an ``await``, or catches even BaseException for ever, is not interrupted.
    Raises: ProgramError when the program cannot be loaded, RuntimeError on a running event loop.
    """
    given = CheckSettings(
        _counts(cluster), tuple(requests), tuple(faults), pairs, crowds, seed, engines or EngineSettings()
    )
    _refuse_running_loop()
    loaded = _load(program, settings or {})
    try:
        return _Check(loaded, dict(settings or {}), given, progress).run()
    finally:
        if not inspect.isclass(program):
            loaded.unload()


def assert_program_is_sound(program: str | Path | type[Program], **options: object) -> Report:
    """``check_program`` for tests: raises AssertionError with the report unless the program is sound."""
    report = check_program(program, **options)  # type: ignore[arg-type]
    if not report.ok:
        raise AssertionError(str(report))
    return report


class _Check:
    def __init__(
        self,
        program: LoadedProgram,
        settings: dict[str, object],
        given: CheckSettings,
        progress: Progress | None,
    ) -> None:
        self._program = program
        self._settings = settings
        self._given = given
        self._progress = progress
        self._random = random.Random(given.seed)
        self._report = Report(program.name, program.path)

    def run(self) -> Report:
        began = time.perf_counter()
        with _quietly():
            calm = [(scene, self._run(scene, {})) for scene in self._scenes()]
            if self._report.ok:
                self._try_faults(calm)
        self._report.wall_s = time.perf_counter() - began
        return self._report

    def _try_faults(self, calm: Sequence[tuple[Scene, Outcome]]) -> None:
        plans = [(scene, out, plan) for scene, out in calm for plan in self._plans(scene, out.stage.moments)]
        for done, (scene, out, plan) in enumerate(plans):
            if self._progress is not None:
                self._progress(done, len(plans))
            self._run(scene, plan, out)
        if self._progress is not None:
            self._progress(len(plans), len(plans))

    def _run(self, scene: Scene, plan: dict[int, Fault], calm: Outcome | None = None) -> Outcome:
        calls = sum(1 for each in calm.stage.moments if each.verb != "chunk") if calm is not None else 0
        limit = _FREE_CALLS * len(scene.requests) + 10 * calls if calm is not None else 1000
        program = self._program
        again = replace(program, instance=type(program.instance)(**self._settings))
        trial = Trial(again, scene, plan, call_limit=limit, seed=self._given.seed)
        out = run_virtual(trial.run())
        verdict = judge(out, program, calm.gauges if calm is not None else frozenset())
        self._report.verdicts.append(verdict)
        if calm is None:
            self._note_awaits(out.stage.moments)
        return out

    def _note_awaits(self, moments: Sequence[Moment]) -> None:
        known = {(each.line, each.verb) for each in self._report.awaits}
        self._report.awaits += [each for each in moments if (each.line, each.verb) not in known]

    def _scenes(self) -> Iterator[Scene]:
        _, decode, hybrid = counts = self._given.cluster
        base = Scene("", (), counts, engines=self._given.engines)
        warm = "decode-0" if decode else "hybrid-0"
        for number, request in enumerate(self._given.requests or (_request(_PROMPT),)):
            own = replace(request, request_id="r0", timeout_s=request.timeout_s or DEADLINE_S)
            which = f"request {number + 1}" if len(self._given.requests) > 1 else "one request"
            cached = own.prompt_token_ids[: min(_CACHED, len(own.prompt_token_ids) - 1)]
            yield replace(base, name=which, requests=(own,))
            if decode or hybrid:
                where = ((warm, cached),)
                yield replace(
                    base, name=f"{which}, most of it cached on {warm}", requests=(own,), cached=where
                )
        crowd = self._given.requests or tuple(_request(length) for length in _CROWD)
        together = [
            replace(each, request_id=f"r{i}", timeout_s=each.timeout_s or DEADLINE_S)
            for i, each in enumerate(crowd)
        ]
        if self._given.crowds:
            yield replace(base, name=f"{len(together)} requests at once", requests=tuple(together))

    def _plans(self, scene: Scene, moments: Sequence[Moment]) -> Iterator[dict[int, Fault]]:
        """moments: of the run without a fault."""
        if len(scene.requests) > 1:
            yield from islice(self._drawn(moments, 3), self._given.crowds)
            return
        for moment in moments:
            for fault in self._given.faults:
                if may_happen(fault, moment):
                    yield {moment.number: fault}
        yield from islice(self._drawn(moments, 2), self._given.pairs // 2)

    def _drawn(self, moments: Sequence[Moment], count: int) -> Iterator[dict[int, Fault]]:
        """Plans of up to ``count`` faults. What comes after the first one may be another run's moments."""
        faults = [fault for fault in self._given.faults if not fault.startswith("all_")]
        while moments and faults:
            drawn: list[PlannedFault] = []
            begin = self._random.randrange(len(moments))
            for _ in range(count):
                drawn.append(PlannedFault(begin, self._random.choice(faults)))
                begin += self._random.randrange(1, 1 + len(moments))
            yield {each.number: each.fault for each in drawn}


def _counts(cluster: tuple[int, ...]) -> tuple[int, int, int]:
    prefill, decode, hybrid = (*cluster, 0)[:3]
    return prefill, decode, hybrid


def _request(length: int) -> GenerationRequest:
    sampling = SamplingParams(seed=7)
    prompt = tuple(range(1000, 1000 + length))
    return GenerationRequest("r0", prompt, sampling, StopParams(max_tokens=_OUTPUT_TOKENS), logprobs=0)


def _load(program: str | Path | type[Program], settings: Mapping[str, object]) -> LoadedProgram:
    if not inspect.isclass(program):
        return load_program(str(program), settings)
    path = inspect.getsourcefile(program)
    if path is None:
        raise ProgramError(f"there is no source file of {program.__name__}")
    line = inspect.getsourcelines(program)[1]
    return LoadedProgram(program.__name__, Path(path), line, program(**settings))


def _refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("the kit has an event loop of its own: call it from a plain function, not a coroutine")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the router's log, and with the caller's random numbers as they were."""
    logger, state = logging.getLogger("microserving"), random.getstate()
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
        random.setstate(state)
