"""When requests are sent: offsets from the beginning of a run, in seconds. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals, ``rate`` a second on average; never ends.

    The same seed gives the same arrivals at every rate, only closer together: what differs between two rates, or two
    patterns, is not the luck of the draw.
    """

    rate: float
    seed: int = 0

    def times(self) -> Iterator[float]:
        draw = random.Random(f"arrivals/{self.seed}")
        return itertools.accumulate(draw.expovariate(1.0) / self.rate for _ in itertools.count())

    def describe(self) -> dict[str, Any]:
        return {"kind": "poisson", "rate": self.rate}


@dataclass(frozen=True, slots=True)
class Constant:
    """One every ``1 / rate`` seconds; never ends."""

    rate: float

    def times(self) -> Iterator[float]:
        return (number / self.rate for number in itertools.count())

    def describe(self) -> dict[str, Any]:
        return {"kind": "constant", "rate": self.rate}


@dataclass(frozen=True, slots=True)
class Replay:
    """At given times (ascending), ``speed`` times as fast."""

    offsets: Sequence[float]
    speed: float = 1.0

    def times(self) -> Iterator[float]:
        return (offset / self.speed for offset in self.offsets)

    def describe(self) -> dict[str, Any]:
        return {"kind": "replay", "speed": self.speed}


@dataclass(frozen=True, slots=True)
class Closed:
    """``concurrency`` clients; each sends its next request when the one before has ended."""

    concurrency: int

    def describe(self) -> dict[str, Any]:
        return {"kind": "closed", "concurrency": self.concurrency}


OpenArrivals = Poisson | Constant | Replay
Arrivals = OpenArrivals | Closed
