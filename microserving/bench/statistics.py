"""From records to figures: means, percentiles, throughput, goodput. Pure.

A percentile lies between the two nearest of the sorted values, in proportion (as numpy's default does).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from microserving.bench.measurement import INTERRUPTED, Measured

LATENCIES = ("ttft", "ttft_from_sent", "tpot", "jct", "jct_from_sent", "queueing")
"""Properties of ``Measured``; with ``itl``, which is of gaps, what ``Summary.latencies`` holds."""
_SLO = re.compile(r"(?P<name>[a-z]+)=(?P<value>\d+(?:\.\d+)?)(?P<unit>ms|s)")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some values: all NaN-free seconds; zeros when there are none (``count`` says so)."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives of one request, in seconds; None: no such objective. itl: of the 99th percentile of its own gaps."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    jct: float | None = None

    def missed_by(self, record: Measured, now: float) -> bool:
        """Whether a request that has not ended at ``now`` took too long already."""
        first = record.pieces[0] if record.pieces else now
        so_far = ((self.ttft, first - record.scheduled), (self.jct, now - record.scheduled))
        return any(limit is not None and time > limit for limit, time in so_far)

    @classmethod
    def parse(cls, text: str) -> Slo:
        """``ttft=2s,tpot=100ms``. Raises ValueError."""
        found: dict[str, float] = {}
        for part in text.split(","):
            match = _SLO.fullmatch(part.strip())
            if match is None or match["name"] not in cls.__dataclass_fields__:
                raise ValueError(
                    f"{part.strip()!r} is no objective; those of ttft, tpot, itl and jct are written as ttft=2s,tpot=100ms"
                )
            found[match["name"]] = float(match["value"]) / (1000 if match["unit"] == "ms" else 1)
        return cls(**found)

    def met_by(self, record: Measured) -> bool:
        """A request that failed, or that has no such time, meets none."""
        if not record.ok:
            return False
        times = {"ttft": record.ttft, "tpot": record.tpot, "jct": record.jct}
        times["itl"] = percentile(record.gaps, 0.99) if record.gaps else None
        if record.output_tokens < 2:  # there is nothing between tokens
            times["tpot"] = times["itl"] = 0.0
        limits = ((getattr(self, name), time) for name, time in times.items())
        return all(limit is None or (time is not None and time <= limit) for limit, time in limits)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. latencies: seconds, of those requests that ended well, by name. errors: how many failed with what.

    wall_s: from the first scheduled time to the last end; rates are per second of it. good: met the objectives; None
    when there are none.
    no_usage, disagreeing: of the completed, those whose server told no token counts, or wrong ones. missed: of the
    interrupted, those that had missed an objective already.
    """

    requests: int
    completed: int
    failed: int
    interrupted: int
    errors: dict[str, int]
    latencies: dict[str, Spread]
    wall_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    good: int | None
    goodput_per_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    no_usage: int = 0
    disagreeing: int = 0
    phases: dict[str, dict[str, Spread]] = field(default_factory=dict)
    missed: int = 0

    @property
    def good_share(self) -> float | None:
        """Of all requests but those that were interrupted while nobody could know."""
        if self.good is None:
            return None
        wanted = self.requests - self.interrupted + self.missed
        return self.good / wanted if wanted else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "good_share": self.good_share}


def percentile(values: Sequence[float], share: float) -> float:
    """share: 0 to 1. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float | None]) -> Spread:
    """Of the values that are there."""
    known = [value for value in values if value is not None]
    if not known:
        return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (percentile(known, share) for share in (0.5, 0.9, 0.99))
    return Spread(len(known), math.fsum(known) / len(known), p50, p90, p99, max(known))


def summarize(records: Iterable[Measured], slo: Slo | None = None, over_s: float | None = None) -> Summary:
    """Of the records that are counted. over_s: when the run was over, on their clock; None: no matter."""
    counted = [record for record in records if record.counted]
    done = [record for record in counted if record.ok]
    errors = Counter(record.error for record in counted if record.error is not None)
    interrupted = errors.pop(INTERRUPTED, 0)
    ends = [record.ended for record in counted if record.ended is not None]
    wall_s = max(ends) - min(record.scheduled for record in counted) if ends else 0.0
    per_s = 1 / wall_s if wall_s > 0 else 0.0
    objectives = slo or Slo()
    cut = [record for record in counted if record.error == INTERRUPTED] if over_s is not None else []
    tokens = [sum(getattr(record, name) for record in done) for name in ("prompt_tokens", "output_tokens")]
    names = sorted({record.phase for record in done if record.phase})
    good = None if slo is None else sum(slo.met_by(record) for record in counted)
    return Summary(
        requests=len(counted),
        completed=len(done),
        failed=sum(errors.values()),
        interrupted=interrupted,
        errors=dict(errors.most_common()),
        latencies=_latencies(done),
        wall_s=wall_s,
        requests_per_s=len(done) * per_s,
        prompt_tokens_per_s=tokens[0] * per_s,
        output_tokens_per_s=tokens[1] * per_s,
        good=good,
        goodput_per_s=None if good is None else good * per_s,
        prompt_tokens=tokens[0],
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=tokens[1],
        no_usage=sum(not record.usage for record in done),
        disagreeing=sum(record.disagrees for record in done),
        phases={name: _latencies([r for r in done if r.phase == name]) for name in names},
        missed=sum(objectives.missed_by(record, over_s or 0.0) for record in cut),
    )


def _latencies(done: Sequence[Measured]) -> dict[str, Spread]:
    found = {name: spread(getattr(record, name) for record in done) for name in LATENCIES}
    return found | {"itl": spread(gap for record in done for gap in record.gaps)}
