"""A whole measurement: starts what is to be compared, runs the experiment, listens for Ctrl-C, makes the report."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from microserving.bench.arrivals import Arrivals
from microserving.bench.clusters import started
from microserving.bench.experiment import Experiment, ExperimentSettings, estimate_s
from microserving.bench.progress import Progress
from microserving.bench.report import Report, make_report
from microserving.bench.targets import Program, Target
from microserving.bench.texts import CHARS_PER_TOKEN, Prose, TokenCounter, by_length, sonnets
from microserving.bench.workloads import Style, Workload, sampling_of
from microserving.cluster.config import ClusterConfig
from microserving.errors import ConfigError, MicroservingError
from microserving.observability.console import Console

BuildWorkload = Callable[[Style], Workload]
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHORT_CHARS, _LONG_CHARS = 500, 2500
"""Of the two texts that tell how many characters a token of a model has."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A line of the comparison: a cluster, and the program that its router runs for it (None: the file's). Candidates with
    one and the same ``config`` share its processes."""

    label: str
    config: ClusterConfig
    program: Program | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. style: its prose is made here, measured by ``count_tokens``, or by what the server says."""

    style: Style
    build: BuildWorkload
    loads: Sequence[Arrivals]
    settings: ExperimentSettings
    count_tokens: TokenCounter | None = None


@asynccontextmanager
async def serving(
    candidates: Sequence[Candidate],
    console: Console,
    *,
    timeout_s: float,
    cache_dir: Path | None = None,
    api_key: str | None = None,
) -> AsyncIterator[list[Target]]:
    """All clusters run while the block does; those that are not asked are idle. Raises StartupError."""
    check_labels([candidate.label for candidate in candidates])
    async with AsyncExitStack() as stack:
        places = {}
        for config in {id(candidate.config): candidate.config for candidate in candidates}.values():
            place = await stack.enter_async_context(started(config, console, cache_dir=cache_dir))
            places[id(config)] = place
        targets = []
        for candidate in candidates:
            place = places[id(candidate.config)]
            if candidate.program is not None and place.admin is None:
                raise ConfigError(f"{candidate.label}: a cluster without a router runs no program")
            target = Target(
                candidate.label,
                place.url,
                api_key=api_key,
                timeout_s=timeout_s,
                admin=place.admin,
                program=candidate.program,
                salted=True,
                about=_about(candidate),
            )
            stack.push_async_callback(target.close)
            targets.append(target)
        yield targets


def check_labels(labels: Sequence[str]) -> None:
    """Raises ConfigError when two lines of the comparison would have the same name."""
    twice = {label for label in labels if labels.count(label) > 1}
    if twice:
        raise ConfigError(
            f"two candidates are called {min(twice)!r}; a cluster file's name is [cluster] name, an address's LABEL=URL, a "
            "program's what --program says"
        )


async def run_suite(targets: Sequence[Target], plan: Plan, console: Console) -> Report:
    """What was measured, also when it was stopped, or ended by a failure after the first run. Raises EngineUnavailable,
    ConfigError."""
    for target in targets:
        await target.connect()
    counter = plan.count_tokens or by_length(await chars_per_token(targets[0], plan.style))
    style = replace(plan.style, prose=Prose(counter))
    estimate = estimate_s(plan.loads, len(targets), plan.settings)
    runs = len(plan.loads) * len(targets)
    takes = "" if estimate is None else f", about {_shown_duration(estimate)} at least"
    console.line(f"{runs} run{'s' * (runs > 1)}{takes}; Ctrl-C ends and shows what was measured")

    def make(target: Target, salt: str) -> Workload:
        return plan.build(_for_target(style, target, salt))

    experiment = Experiment(targets, plan.loads, make, plan.settings, Progress(console, runs))
    error = await _run_out(experiment, console)
    described = plan.build(style).describe()
    return make_report(
        experiment,
        targets,
        plan.settings,
        workload=described,
        sampling=sampling_of(style),
        seed=style.seed,
        error=error,
    )


async def _run_out(experiment: Experiment, console: Console) -> str | None:
    """Until its end, or until signals or a failure end it: why, in the latter case. Raises EngineUnavailable, ConfigError
    before anything was measured."""
    running = asyncio.create_task(experiment.run())
    try:
        with _ended_by_signals(experiment, running, console):
            await asyncio.wait({running})
    finally:
        running.cancel()
        await asyncio.wait({running})
    error = None if running.cancelled() else running.exception()
    if error is None:
        return None
    if not experiment.runs or not isinstance(error, MicroservingError):
        raise error
    console.line(f"ending: {error.message}")
    experiment.stopped = True
    return error.message


def _shown_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _for_target(style: Style, target: Target, salt: str) -> Style:
    sampling = style.sampling
    extra = {"cache_salt": salt, **sampling.extra} if target.salted else sampling.extra
    return replace(style, sampling=replace(sampling, model=sampling.model or target.model, extra=extra))


async def chars_per_token(target: Target, style: Style) -> float:
    """Of the sonnets, by the server's own count for two prompts: what a chat template adds falls out."""
    await target.prepare()
    text, counts = "\n\n".join(sonnets()), []
    for size in (_SHORT_CHARS, _LONG_CHARS):
        ask = _for_target(style, target, "length").ask(text[:size], 1, 0)
        counts.append((await target.ask(ask.path, ask.body)).prompt_tokens)
    tokens = counts[1] - counts[0]
    return (_LONG_CHARS - _SHORT_CHARS) / tokens if tokens > 0 else CHARS_PER_TOKEN


@contextmanager
def _ended_by_signals(experiment: Experiment, running: asyncio.Task[Any], console: Console) -> Iterator[None]:
    """A first Ctrl-C (or SIGTERM) ends the runs in order, a second one at once, without the run that goes on."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        if experiment.stopped:
            running.cancel()
            return
        console.line("ending: what was measured is kept")
        experiment.stop()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


def _about(candidate: Candidate) -> Mapping[str, Any]:
    """For the report."""
    program = candidate.program
    return {
        "cluster": candidate.config.model_dump(mode="json", exclude_unset=True),
        "program": None if program is None else program.name,
        "program_settings": {} if program is None else dict(program.settings),
    }
