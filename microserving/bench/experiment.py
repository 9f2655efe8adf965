"""Runs of several targets at several loads, in turns, so that a machine that changes its pace changes it for all.

Owns the order of runs and what is taken down of each. Does not know how targets are started nor how results look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from microserving.bench.arrivals import Arrivals, Closed, Constant, Poisson, Replay
from microserving.bench.load import Load, LoadSettings
from microserving.bench.measurement import Measured
from microserving.bench.progress import Progress
from microserving.bench.statistics import Slo, Summary, summarize
from microserving.bench.targets import Target, Transfers, disturbance_between, transfers_between
from microserving.bench.workloads import Workload

MakeWorkload = Callable[[Target, str], Workload]
"""(who is asked, a salt of this run's own) -> what is asked."""
_TAIL_S = 8.0
"""For the estimate: what a run takes beyond its arrivals."""


@dataclass(frozen=True, slots=True)
class Run:
    """One target at one load. rate: requests a second, None for other loads than open ones; load: in words. client_cpu_s:
    what the client itself used. stopped: it was ended early. disturbance: why its figures are not those of ``label``."""

    label: str
    load: str
    rate: float | None
    arrivals: dict[str, Any]
    began_at: float
    duration_s: float
    client_cpu_s: float
    stopped: bool
    records: list[Measured]
    summary: Summary
    transfers: Transfers | None
    disturbance: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "load": self.load,
            "rate": self.rate,
            "arrivals": self.arrivals,
            "began_at": self.began_at,
            "duration_s": self.duration_s,
            "client_cpu_s": self.client_cpu_s,
            "stopped": self.stopped,
            "summary": self.summary.as_dict(),
            "transfers": None if self.transfers is None else self.transfers.as_dict(),
            "disturbance": self.disturbance,
            "requests": [record.as_dict() for record in self.records],
        }


@dataclass(frozen=True, slots=True)
class ExperimentSettings:
    """max_run_s: a run that takes longer is ended; what did not end by then counts as interrupted."""

    load: LoadSettings
    slo: Slo | None = None
    max_run_s: float | None = None


class Experiment:
    """All runs. ``runs`` has those that have ended, also when ``run`` was cancelled or has failed."""

    def __init__(
        self,
        targets: Sequence[Target],
        loads: Sequence[Arrivals],
        make_workload: MakeWorkload,
        settings: ExperimentSettings,
        progress: Progress,
    ) -> None:
        self.runs: list[Run] = []
        self.stopped = False
        self._targets = targets
        self._loads = loads
        self._make = make_workload
        self._settings = settings
        self._progress = progress
        self._load: Load | None = None

    def stop(self) -> None:
        """End the run that goes on, keep what it has, and begin no more."""
        self.stopped = True
        if self._load is not None:
            self._load.stop()

    async def run(self) -> list[Run]:
        """Raises EngineUnavailable, ConfigError when a target does not answer as it should."""
        for target in self._targets:
            if self.stopped:
                return self.runs
            await self._try(target)
        for turn, arrivals in enumerate(self._loads):
            first = turn % len(self._targets)
            for target in (*self._targets[first:], *self._targets[:first]):
                if self.stopped:
                    return self.runs
                run = await self._run(target, arrivals, f"run-{turn}-{time.time_ns()}")
                if run.summary.requests:  # else it was ended during its warm-up
                    self.runs.append(run)
        return self.runs

    async def _try(self, target: Target) -> None:
        """One request that is not counted: what is wrong is known before anything is measured."""
        await target.prepare()
        session = self._make(target, f"try-{time.time_ns()}").session(0)
        ask = next(session)
        await target.ask(ask.path, ask.body)

    async def _run(self, target: Target, arrivals: Arrivals, salt: str) -> Run:
        await target.prepare()
        workload = self._make(target, salt)
        before = await target.stats()
        load = Load(target.wire, workload, arrivals, self._settings.load, self._progress.show)
        self._load = load
        if self.stopped:  # meanwhile
            load.stop()
        self._progress.begin(f"{target.label}, {load_name(arrivals)}")
        await load.prepare()
        began_at, cpu_s, limit = time.time(), time.process_time(), self._settings.max_run_s
        timer = None if limit is None else asyncio.get_running_loop().call_later(limit, load.stop)
        try:
            records = await load.run()
        finally:
            self._load = None
            if timer is not None:
                timer.cancel()
        duration_s, used_s = load.clock(), time.process_time() - cpu_s
        self._progress.end(load)
        if not self.stopped:
            await target.settle()
        after, summary = await target.stats(), summarize(records, self._settings.slo, duration_s)
        return Run(
            label=target.label,
            load=load_name(arrivals),
            rate=arrivals.rate if isinstance(arrivals, Poisson | Constant) else None,
            arrivals=arrivals.describe(),
            began_at=began_at,
            duration_s=duration_s,
            client_cpu_s=used_s,
            stopped=load.sessions_done < load.sessions,
            records=records,
            summary=summary,
            transfers=transfers_between(before, after),
            disturbance=disturbance_between(before, after),
        )


def load_name(arrivals: Arrivals) -> str:
    """In words."""
    match arrivals:
        case Closed(concurrency):
            return f"{concurrency} at once"
        case Replay(_, speed):
            return "replay" if speed == 1 else f"replay x{speed:g}"
        case Poisson(rate) | Constant(rate):
            return f"{rate:g}/s"


def estimate_s(loads: Sequence[Arrivals], targets: int, settings: ExperimentSettings) -> float | None:
    """About how long it takes; None when nobody knows (closed loops)."""
    total = 0.0
    for arrivals in loads:
        if isinstance(arrivals, Closed):
            return None
        if isinstance(arrivals, Replay):
            takes = arrivals.offsets[-1] / arrivals.speed
        else:
            takes = (settings.load.sessions + settings.load.warmup) / arrivals.rate
        total += targets * min(takes + _TAIL_S, settings.max_run_s or float("inf"))
    return total
