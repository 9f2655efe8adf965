"""The JSON file: everything that was measured and what it was measured with; tables, charts and comparisons read it."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypedDict

import msgspec

from microserving.bench.experiment import Experiment, ExperimentSettings
from microserving.bench.machine import machine, versions
from microserving.bench.measurement import Measured
from microserving.bench.statistics import Slo, Spread
from microserving.bench.targets import Target
from microserving.errors import ConfigError, StartupError

FORMAT: Final = 1
_KEY_FLAG = "--api-key"
Report = dict[str, Any]
"""As ``make_report`` makes it."""
RunData = Mapping[str, Any]
"""One of its `runs` (``Run.as_dict``)."""


class _SummaryData(TypedDict):
    requests: int
    completed: int
    failed: int
    interrupted: int
    errors: dict[str, int]
    latencies: dict[str, Spread]
    requests_per_s: float
    output_tokens_per_s: float
    good_share: float | None
    goodput_per_s: float | None
    no_usage: int
    disagreeing: int
    phases: dict[str, dict[str, Spread]]


class _TransfersData(TypedDict):
    hand_offs: int
    bytes_sent: int
    transfer_ms: float
    exposed_ms: float
    hidden_ms: float


class _RunSchema(TypedDict):
    label: str
    load: str
    rate: float | None
    arrivals: dict[str, Any]
    began_at: float
    client_cpu_s: float
    summary: _SummaryData
    transfers: _TransfersData | None
    requests: list[Measured]


class _WorkloadData(TypedDict):
    name: str


class _MachineData(TypedDict):
    processor: str
    cores: list[Any]


class _ReportSchema(TypedDict):
    """What tables, charts and comparisons read; there is more in a file."""

    made_at: float
    stopped: bool
    seed: int
    workload: _WorkloadData
    sessions: int
    warmup: int
    machine: _MachineData
    runs: list[_RunSchema]


def make_report(
    experiment: Experiment,
    targets: Iterable[Target],
    settings: ExperimentSettings,
    *,
    workload: Mapping[str, Any],
    sampling: Mapping[str, Any],
    seed: int,
    error: str | None = None,
) -> Report:
    """Of the runs that there are. What was measured when: `began_at` of each run, Unix time. error: what ended it early."""
    load = settings.load
    return {
        "format": FORMAT,
        "made_at": time.time(),
        "command": shlex.join(_without_key(sys.argv)),
        "stopped": experiment.stopped,
        "error": error,
        "seed": seed,
        "workload": dict(workload),
        "sampling": dict(sampling),
        "sessions": load.sessions,
        "warmup": load.warmup,
        "keep_load": load.keep_load,
        "max_concurrency": load.max_concurrency,
        "max_run_s": settings.max_run_s,
        "slo": None if settings.slo is None else _slo_s(settings.slo),
        "machine": machine(),
        "versions": versions(),
        "targets": [{"label": target.label, "model": target.model, **target.about} for target in targets],
        "runs": [run.as_dict() for run in experiment.runs],
    }


def _without_key(arguments: Sequence[str]) -> list[str]:
    """Reports are shown around."""
    shown = [f"{_KEY_FLAG}=***" if word.startswith(f"{_KEY_FLAG}=") else word for word in arguments]
    return ["***" if before == _KEY_FLAG else word for before, word in zip(["", *shown], shown, strict=False)]


def _slo_s(slo: Slo) -> dict[str, float]:
    """The objectives that there are, in seconds."""
    return {name: value for name, value in asdict(slo).items() if value is not None}


def write_text(path: Path, text: str) -> None:
    """Raises StartupError."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from error


def write_report(path: Path, report: Report) -> None:
    """A line for each run, so that two files can be told apart by eye. Raises StartupError."""
    runs = ",\n".join(json.dumps(run, separators=(",", ":")) for run in report["runs"])
    head = json.dumps({**report, "runs": []}, indent=1)
    write_text(path, head.replace('"runs": []', f'"runs": [\n{runs}\n]' if runs else '"runs": []') + "\n")


def read_report(path: Path) -> Report:
    """Raises ConfigError."""
    try:
        report = json.loads(path.read_text("utf-8"), parse_constant=_finite, parse_float=_finite)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ConfigError(f"{path}: no report of this version of microserving bench")
    try:
        msgspec.convert(report, _ReportSchema)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: a damaged report: {error}") from error
    return report


def _finite(text: str) -> float:
    """Raises ValueError; also for what JSON has no word for."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number")
    return value


def labels_of(runs: Sequence[RunData]) -> list[str]:
    """In the order of their first runs."""
    return list(dict.fromkeys(run["label"] for run in runs))


def records_of(run: RunData) -> list[Measured]:
    """All that was sent in a run."""
    return [Measured.from_dict(dict(data)) for data in run["requests"]]


def latency(run: RunData, name: str, figure: str) -> float | None:
    """In seconds; None when no request had one. figure: mean, p50, p90, p99, max."""
    spread = run["summary"]["latencies"][name]
    return spread[figure] if spread["count"] else None
