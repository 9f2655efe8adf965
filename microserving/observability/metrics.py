"""Every metric that a process shows at `/metrics`: its name, its help and its labels, in one place.

Owns the names and the text format (by ``prometheus_client``, over registries of our own). Does not know where the
figures come from: whoever has them hands over a ``Figures`` at each scrape, so nothing is counted twice and a counter
is exactly as monotone as what it is read from. Labels have fixed sets of values: nothing that a client sent.

A metric never fails a request: an impossible value is dropped and counted in ``METRIC_ERRORS``.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeGuard

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

_logger = logging.getLogger(__name__)

PREFIX: Final = "microserving_"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["gauge", "counter", "histogram", "info"]


@dataclass(frozen=True, slots=True)
class MetricName:
    """name: with ``PREFIX``, a counter's without `_total`. labels: their names."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()


def _gauge(name: str, text: str, *labels: str) -> MetricName:
    return MetricName("gauge", PREFIX + name, text, labels)


def _counter(name: str, text: str, *labels: str) -> MetricName:
    return MetricName("counter", PREFIX + name, text, labels)


def _histogram(name: str, text: str, *labels: str) -> MetricName:
    return MetricName("histogram", PREFIX + name, text, labels)


# --- every process ---------------------------------------------------------------------------------------------------

BUILD_INFO: Final = MetricName("info", PREFIX + "build", "What this process is")
METRIC_ERRORS: Final = _counter("metric_errors", "Impossible values that were given to a metric and dropped")

# --- an engine -------------------------------------------------------------------------------------------------------

KV_PAGES: Final = _gauge("kv_pages", "KV pages by state; they add up to the pool", "state")
KV_PAGES_PINNED: Final = _gauge("kv_pages_pinned", "Cached KV pages that somebody uses")
RUNNING: Final = _gauge("requests_running", "Generations and sends that have pages")
WAITING: Final = _gauge("requests_waiting", "Generations, sends and reservations that wait for pages")
LEASES: Final = _gauge("leases", "Live reservations by state", "state")
QUEUED_PREFILL_TOKENS: Final = _gauge("queued_prefill_tokens", "Prompt tokens still to be computed")
PROMPT_TOKENS: Final = _counter(
    "prompt_tokens_computed", "Prompt positions computed, again after a preemption"
)
RECOMPUTED_TOKENS: Final = _counter("recomputed_tokens", "Positions computed again after a preemption")
OUTPUT_TOKENS: Final = _counter("output_tokens", "Tokens sampled")
TOKENS_SENT: Final = _counter("tokens_sent", "Positions whose K/V was put into another engine")
BYTES_SENT: Final = _counter("bytes_sent", "Bytes of K/V put into other engines")
TOKENS_RECEIVED: Final = _counter("tokens_received", "Positions whose K/V arrived from another engine")
PREFIX_QUERY_TOKENS: Final = _counter("prefix_query_tokens", "Tokens looked up in the prefix cache")
PREFIX_HIT_TOKENS: Final = _counter("prefix_hit_tokens", "Tokens found in the prefix cache")
EVICTED_PAGES: Final = _counter("evicted_pages", "Cached pages freed for others")
PREEMPTIONS: Final = _counter("preemptions", "Sequences that lost their pages to older ones")
ABORTS: Final = _counter("aborts", "Requests and reservations ended by their caller")
LEASES_EXPIRED: Final = _counter("leases_expired", "Reservations that nobody used in time")
FINISHED: Final = _counter(
    "requests_finished", "Generations (each choice is one) and sends of this engine by ending", "ending"
)
STEP_SECONDS: Final = _histogram(
    "step_seconds", "One model step, by whether prompts were computed in it", "kind"
)
TTFT_SECONDS: Final = _histogram("engine_ttft_seconds", "From a generation's arrival to its first token")
ITL_SECONDS: Final = _histogram("engine_itl_seconds", "Between two tokens of a generation")

# --- a router --------------------------------------------------------------------------------------------------------

ROUTER_REQUESTS: Final = _counter("router_requests", "Requests of clients that ended, by how", "outcome")
ROUTER_GENERATIONS: Final = _counter(
    "router_generations", "Generations (each choice is one) that ended, by how", "outcome"
)
ROUTER_GENERATIONS_RUNNING: Final = _gauge(
    "router_generations_running", "Generations that run, by state", "state"
)
ROUTER_RETRIES: Final = _counter("router_retries", "Attempts made again before the first token")
ROUTER_RESUMES: Final = _counter("router_resumes", "Streams that went on on another engine")
ROUTER_HEDGES: Final = _counter("router_hedges", "Attempts made beside another one")
ROUTER_OUTPUT_TOKENS: Final = _counter(
    "router_output_tokens", "Tokens sent to clients, whatever became of them"
)
ROUTER_WAITING: Final = _gauge("router_requests_waiting", "Requests that wait to be dispatched")
ROUTER_QUEUED: Final = _counter("router_requests_queued", "Requests that had to wait to be dispatched")
ROUTER_REFUSED: Final = _counter("router_requests_refused", "Requests that were refused because of the load")
ROUTER_LOAD_LEVEL: Final = _gauge("router_load_level", "1 for the level that holds", "level")
ROUTER_PROGRAM_VERSION: Final = _gauge("router_program_version", "Number of the program that is in charge")
ROUTER_ROLLBACKS: Final = _counter("router_rollbacks", "Programs that were rolled back")
ROUTER_ENGINE_UP: Final = _gauge("router_engine_up", "1 while the engine is in its pools", "engine", "role")
ROUTER_ENGINE_REQUESTS: Final = _gauge(
    "router_engine_requests", "Requests that the router has on the engine", "engine", "role"
)
ROUTER_TTFT_SECONDS: Final = _histogram(
    "router_ttft_seconds", "From a generation's arrival to its first output"
)
ROUTER_REQUEST_SECONDS: Final = _histogram("router_request_seconds", "From a generation's arrival to its end")

DURATION_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STEP_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
TTFT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)


# --- values ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Histogram:
    """Counts of observations by upper bound (the last, +Inf, is added). Not thread-safe.

    errors: values that were no finite number >= 0; they are not counted.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0
    errors: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Never raises, whatever the value is."""
        if type(value) not in (int, float) or not 0.0 <= value < math.inf:
            self.errors += 1
            return
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        same = Histogram(self.bounds, self.total, self.errors)
        same.counts = list(self.counts)
        return same


Value = float | Histogram | Mapping[str, str]
"""Of a gauge or a counter, of a histogram, of an info."""


class Figures:
    """What one scrape shows. A value that its metric cannot have is left out and counted."""

    def __init__(self) -> None:
        self.errors = 0
        self._families: dict[str, Metric] = {}

    def put(self, metric: MetricName, value: Value, *labels: str) -> None:
        """Never raises. labels: one for each of the metric's."""
        try:
            self._put(metric, value, labels)
        except Exception:  # the wall: a figure that is wrong must not hide the others
            self.errors += 1
            _logger.warning("the metric %s cannot be shown", metric.name, exc_info=True)

    def put_all(self, metric: MetricName, values: Mapping[str, float]) -> None:
        """One value per value of the metric's only label."""
        for label, value in values.items():
            self.put(metric, value, label)

    def families(self) -> Iterable[Metric]:
        self.put(METRIC_ERRORS, self.errors)
        return self._families.values()

    def _put(self, metric: MetricName, value: Value, labels: Sequence[str]) -> None:
        if len(labels) != len(metric.labels):
            raise ValueError(f"{len(labels)} labels for {metric.labels}")
        family = self._families.get(metric.name) or _family(metric)
        if isinstance(family, HistogramMetricFamily) and isinstance(value, Histogram):
            self.errors += value.errors
            family.add_metric(labels, _cumulative(value), value.total)
        elif isinstance(family, InfoMetricFamily) and isinstance(value, Mapping):
            family.add_metric(labels, dict(value))
        elif isinstance(family, (GaugeMetricFamily, CounterMetricFamily)) and _is_number(value):
            if not math.isfinite(value) or (metric.kind == "counter" and value < 0):
                raise ValueError(f"{value} is no value of a {metric.kind}")
            family.add_metric(labels, float(value))
        else:
            raise TypeError(f"a {metric.kind} has no value of type {type(value).__name__}")
        self._families[metric.name] = family


class _FigureCollector(Collector):
    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        return self._figures().families()

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering asks for no figures


class Exposition:
    """One process's `/metrics`. figures: called at every scrape."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_FigureCollector(figures))

    def text(self) -> bytes:
        """In Prometheus' text format (``CONTENT_TYPE``)."""
        return generate_latest(self._registry)


def _family(metric: MetricName) -> Metric:
    kinds = {
        "gauge": GaugeMetricFamily,
        "counter": CounterMetricFamily,
        "histogram": HistogramMetricFamily,
        "info": InfoMetricFamily,
    }
    family: Metric = kinds[metric.kind](metric.name, metric.help, labels=metric.labels)
    return family


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """(upper bound, observations up to it), as Prometheus wants it."""
    pairs, sum_so_far = [], 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        sum_so_far += count
        pairs.append(("+Inf" if bound == math.inf else repr(bound), float(sum_so_far)))
    return pairs
