"""Two reports side by side, or the patterns of one: by how much each latency differs, and whether that could be chance.

Chance is that of the requests of these two runs, of which neighbours are alike, for they wait in one queue; where both had
the same requests at the same times, of what these cost in one and in the other. That another run on another day would
differ, too, is not in it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from microserving.bench.report import Report, RunData, labels_of, latency, records_of
from microserving.bench.table import aligned, notes_on, shown_s
from microserving.errors import ConfigError

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
    """A table of the runs that both have; then what only one of them has, and what makes the comparison unfair. Runs are
    the same by pattern and load; by load alone where each report has one pattern. Raises ConfigError when none are."""
    ours, theirs = _keyed(a), _keyed(b)
    names = labels_of(a["runs"]), labels_of(b["runs"])
    if all(len(labels) == 1 for labels in names) and names[0] != names[1]:
        label = f"{names[0][0]} -> {names[1][0]}"
        ours, theirs = _keyed(a, label), _keyed(b, label)
    both = [key for key in ours if key in theirs]
    if not both:
        raise ConfigError(
            "the two have no run in common: runs are compared that have the same pattern and load; "
            f"A has {_shown_keys(ours)}; B has {_shown_keys(theirs)}"
        )
    same = all(a.get(what) == b.get(what) for what in ("seed", "workload"))
    lines = [row for key in both for row in _rows(key, ours[key], theirs[key], same_requests=same)]
    parts = [aligned([_HEAD, *lines])]
    for name, only in (("A", ours.keys() - theirs.keys()), ("B", theirs.keys() - ours.keys())):
        parts += [f"only in {name}: {key[0]}, {_shown_load(key)}\n" for key in sorted(only)]
    for key in both:
        parts += [f"A: {note}\n" for note in notes_on(ours[key])]
        parts += [f"B: {note}\n" for note in notes_on(theirs[key])]
        if ours[key]["arrivals"] != theirs[key]["arrivals"]:
            parts.append(f"{key[0]}, {_shown_load(key)}: requests arrive otherwise in B\n")
    parts += [f"{what} differs: A has {a.get(what)}, B has {b.get(what)}\n" for what in _differing(a, b)]
    return "".join(parts)


def compare_patterns(report: Report, baseline: str | None = None) -> str:
    """Each other pattern of a report against one, load by load. baseline: None = the first. Raises ConfigError."""
    labels = labels_of(report["runs"])
    if baseline is not None and baseline not in labels:
        raise ConfigError(f"there is no pattern {baseline!r}, but {', '.join(map(repr, labels)) or 'none'}")
    if len(labels) < 2:
        raise ConfigError("a report of one pattern has nothing to compare: give a second report")
    first = labels[0] if baseline is None else baseline
    runs = _keyed(report)
    pairs = [(key, runs[first, *key[1:]]) for key in runs if key[0] != first and (first, *key[1:]) in runs]
    lines = [row for key, base in pairs for row in _rows(key, base, runs[key], same_requests=True)]
    notes = [note for run in runs.values() for note in notes_on(run)]
    return "".join(
        [f"A is {first}, B the pattern named\n", aligned([_HEAD, *lines]), *(f"{n}\n" for n in notes)]
    )


def ratio_interval(
    a: Sequence[float], b: Sequence[float], seed: int = 0, *, paired: bool = False
) -> tuple[float, float] | None:
    """Bounds of mean(b) / mean(a), by drawing from the values, which are in the order of time, again and again (95 %
    percentiles of a circular block bootstrap, Politis and Romano 1992). None for fewer than two values, or a mean of 0.

    paired: the values at one place are of the same request, and are drawn together."""
    if min(len(a), len(b)) < 2 or not sum(a) or not sum(b):
        return None
    draw, ratios = random.Random(seed), []
    for _ in range(_RESAMPLES):
        ours = _places(draw, len(a))
        theirs = ours if paired else _places(draw, len(b))
        ratios.append(_mean_of(b, theirs) / max(_mean_of(a, ours), 1e-12))
    ratios.sort()
    return ratios[int(_TAIL * _RESAMPLES)], ratios[int((1 - _TAIL) * _RESAMPLES) - 1]


def _places(draw: random.Random, count: int) -> list[int]:
    """As many places, in stretches of about as many neighbours as there are stretches."""
    length = round(math.sqrt(count))
    begins = (draw.randrange(count) for _ in range(0, count, length))
    return [(begin + at) % count for begin in begins for at in range(length)][:count]


def _mean_of(values: Sequence[float], places: Sequence[int]) -> float:
    return sum(values[place] for place in places) / len(places)


def _keyed(report: Report, label: str | None = None) -> dict[_Key, RunData]:
    """By label (None: its own) and load, and by number where one was measured again."""
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[_Key, RunData] = {}
    for run in report["runs"]:
        seen[of := (label or run["label"], run["load"])] += 1
        found[(*of, seen[of])] = run
    return found


def _shown_keys(keys: Iterable[_Key]) -> str:
    return "; ".join(f"{key[0]}, {_shown_load(key)}" for key in keys) or "none"


def _shown_load(key: _Key) -> str:
    return key[1] if key[2] == 1 else f"{key[1]} ({key[2]})"


def _rows(key: _Key, a: RunData, b: RunData, *, same_requests: bool) -> Iterator[tuple[str, ...]]:
    """same_requests: the n-th one is the same in both."""
    for name, figure in _COMPARED:
        before, after = latency(a, name, figure), latency(b, name, figure)
        ratio = f"{after / before:.3f}" if before and after is not None else "-"
        bounds = _bounds(a, b, name, same_requests) if figure == "mean" else None
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


def _bounds(a: RunData, b: RunData, name: str, same_requests: bool) -> tuple[float, float] | None:
    ours, theirs = _values(a, name), _values(b, name)
    same_times = a["arrivals"] == b["arrivals"] and "concurrency" not in a["arrivals"]
    paired = same_requests and same_times and list(ours) == list(theirs)
    return ratio_interval(list(ours.values()), list(theirs.values()), paired=paired)


def _values(run: RunData, name: str) -> dict[tuple[int, int], float]:
    """Of each request, by conversation and turn, in the order of their times."""
    records = (record for record in records_of(run) if record.counted and record.ok)
    values = {(record.session, record.turn): getattr(record, name) for record in records}
    return {request: value for request, value in values.items() if value is not None}


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
