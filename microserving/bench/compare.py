"""Two reports side by side: by how much each latency changed, and whether that could be chance."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from microserving.bench.report import Report, RunData, latency, records_of
from microserving.bench.table import aligned, shown_s

_COMPARED = (
    ("ttft", "mean"),
    ("ttft", "p99"),
    ("tpot", "mean"),
    ("tpot", "p99"),
    ("jct", "mean"),
    ("jct", "p99"),
)
_RESAMPLES = 400
_TAIL = 0.025
_HEAD = ("PATTERN", "LOAD", "", "A", "B", "B/A", "95 % OF MEANS")


def compare(a: Report, b: Report) -> str:
    """A table of the runs that both have; then what only one of them has."""
    ours = {_key(run): run for run in a["runs"]}
    theirs = {_key(run): run for run in b["runs"]}
    both = [key for key in ours if key in theirs]
    lines = [row for key in both for row in _rows(ours[key], theirs[key])]
    parts = [aligned([_HEAD, *lines])] if lines else ["the two have no run in common\n"]
    for name, only in (("A", ours.keys() - theirs.keys()), ("B", theirs.keys() - ours.keys())):
        parts += [f"only in {name}: {label}, {load}\n" for label, load in sorted(only)]
    parts += [f"{what} differs: A has {a.get(what)}, B has {b.get(what)}\n" for what in _differing(a, b)]
    return "".join(parts)


def ratio_interval(a: Sequence[float], b: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Bounds of mean(b) / mean(a), by drawing from the values again and again (bootstrap percentiles, 95 %). None for
    fewer than two values, or a mean of 0."""
    if min(len(a), len(b)) < 2 or not sum(a) or not sum(b):
        return None
    draw = random.Random(seed)
    ratios = sorted(_mean_again(draw, b) / max(_mean_again(draw, a), 1e-12) for _ in range(_RESAMPLES))
    return ratios[int(_TAIL * _RESAMPLES)], ratios[int((1 - _TAIL) * _RESAMPLES) - 1]


def _mean_again(draw: random.Random, values: Sequence[float]) -> float:
    return sum(draw.choices(values, k=len(values))) / len(values)


def _key(run: RunData) -> tuple[str, str]:
    return run["label"], run["load"]


def _rows(a: RunData, b: RunData) -> Iterator[tuple[str, ...]]:
    for name, figure in _COMPARED:
        before, after = latency(a, name, figure), latency(b, name, figure)
        ratio = f"{after / before:.3f}" if before and after is not None else "-"
        bounds = ratio_interval(_values(a, name), _values(b, name)) if figure == "mean" else None
        shown = "" if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"
        yield (*_key(a), f"{name.upper()} {figure}", shown_s(before), shown_s(after), ratio, shown)


def _values(run: RunData, name: str) -> list[float]:
    values = (getattr(record, name) for record in records_of(run) if record.counted and record.ok)
    return [value for value in values if value is not None]


def _differing(a: Report, b: Report) -> Iterator[str]:
    """What makes a comparison unfair."""
    for what in ("workload", "sampling", "sessions", "warmup", "seed", "slo"):
        if a.get(what) != b.get(what):
            yield what
    if (
        a["machine"]["processor"] != b["machine"]["processor"]
        or a["machine"]["cores"] != b["machine"]["cores"]
    ):
        yield "machine"
