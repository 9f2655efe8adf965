"""Two reports side by side: by how much each latency changed, and whether that could be chance.

Chance is that of the requests of these two runs, of which neighbours are alike, for they wait in one queue. That another
run on another day would differ, too, is not in it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from microserving.bench.report import Report, RunData, latency, records_of
from microserving.bench.table import aligned, notes_on, shown_s

_COMPARED = (
    ("ttft", "mean"),
    ("ttft", "p99"),
    ("tpot", "mean"),
    ("tpot", "p99"),
    ("itl", "p99"),
    ("jct", "mean"),
    ("jct", "p99"),
)
_CONDITIONS = (
    "workload",
    "sampling",
    "sessions",
    "warmup",
    "keep_load",
    "max_concurrency",
    "max_run_s",
    "seed",
    "slo",
)
_RESAMPLES = 400
_TAIL = 0.025
_Key = tuple[str, str, int]
"""Label, load, and which of several such runs."""
_HEAD = ("PATTERN", "LOAD", "", "A", "B", "B/A", "95 % OF MEANS")


def compare(a: Report, b: Report) -> str:
    """A table of the runs that both have; then what only one of them has, and what makes the comparison unfair."""
    ours, theirs = _keyed(a), _keyed(b)
    both = [key for key in ours if key in theirs]
    lines = [row for key in both for row in _rows(key, ours[key], theirs[key])]
    parts = [aligned([_HEAD, *lines])] if lines else ["the two have no run in common\n"]
    for name, only in (("A", ours.keys() - theirs.keys()), ("B", theirs.keys() - ours.keys())):
        parts += [f"only in {name}: {key[0]}, {_shown_load(key)}\n" for key in sorted(only)]
    for key in both:
        parts += [f"A: {note}\n" for note in notes_on(ours[key])]
        parts += [f"B: {note}\n" for note in notes_on(theirs[key])]
        if ours[key]["arrivals"] != theirs[key]["arrivals"]:
            parts.append(f"{key[0]}, {_shown_load(key)}: requests arrive otherwise in B\n")
    parts += [f"{what} differs: A has {a.get(what)}, B has {b.get(what)}\n" for what in _differing(a, b)]
    return "".join(parts)


def ratio_interval(a: Sequence[float], b: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Bounds of mean(b) / mean(a), by drawing from the values, which are in the order of time, again and again (95 %
    percentiles of a circular block bootstrap, Politis and Romano 1992). None for fewer than two values, or a mean of 0."""
    if min(len(a), len(b)) < 2 or not sum(a) or not sum(b):
        return None
    draw = random.Random(seed)
    ratios = sorted(_mean_again(draw, b) / max(_mean_again(draw, a), 1e-12) for _ in range(_RESAMPLES))
    return ratios[int(_TAIL * _RESAMPLES)], ratios[int((1 - _TAIL) * _RESAMPLES) - 1]


def _mean_again(draw: random.Random, values: Sequence[float]) -> float:
    """Of stretches of about as many neighbours as there are stretches."""
    count = len(values)
    length = round(math.sqrt(count))
    begins = (draw.randrange(count) for _ in range(0, count, length))
    drawn = [values[(begin + at) % count] for begin in begins for at in range(length)]
    return sum(drawn[:count]) / count


def _keyed(report: Report) -> dict[_Key, RunData]:
    """By label and load, and by number where one was measured again."""
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[_Key, RunData] = {}
    for run in report["runs"]:
        seen[of := (run["label"], run["load"])] += 1
        found[(*of, seen[of])] = run
    return found


def _shown_load(key: _Key) -> str:
    return key[1] if key[2] == 1 else f"{key[1]} ({key[2]})"


def _rows(key: _Key, a: RunData, b: RunData) -> Iterator[tuple[str, ...]]:
    for name, figure in _COMPARED:
        before, after = latency(a, name, figure), latency(b, name, figure)
        ratio = f"{after / before:.3f}" if before and after is not None else "-"
        bounds = ratio_interval(_values(a, name), _values(b, name)) if figure == "mean" else None
        shown = "" if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"
        yield (
            key[0],
            _shown_load(key),
            f"{name.upper()} {figure}",
            shown_s(before),
            shown_s(after),
            ratio,
            shown,
        )


def _values(run: RunData, name: str) -> list[float]:
    values = (getattr(record, name) for record in records_of(run) if record.counted and record.ok)
    return [value for value in values if value is not None]


def _differing(a: Report, b: Report) -> Iterator[str]:
    """What makes a comparison unfair."""
    for what in _CONDITIONS:
        if a.get(what) != b.get(what):
            yield what
    if (
        a["machine"]["processor"] != b["machine"]["processor"]
        or a["machine"]["cores"] != b["machine"]["cores"]
    ):
        yield "machine"
