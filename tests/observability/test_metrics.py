"""What `/metrics` shows, and that no value can break it."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from microserving.observability import metrics
from microserving.observability.metrics import Exposition, Figures, Histogram, MetricName


def samples(figures: Figures) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, label values) -> value, as a Prometheus server reads the text."""
    text = Exposition(lambda: figures).text().decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def every_metric() -> list[MetricName]:
    return [value for value in vars(metrics).values() if isinstance(value, MetricName)]


def test_every_name_is_there_once_and_prefixed() -> None:
    names = [metric.name for metric in every_metric()]
    assert len(set(names)) == len(names)
    assert all(name.startswith("microserving_") and not name.endswith("_total") for name in names)
    assert all(metric.help for metric in every_metric())


def test_the_text_is_what_was_put() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(seconds)
    figures = Figures()
    figures.put(metrics.RUNNING, 3)
    figures.put_all(metrics.KV_PAGES, {"free": 5, "cached": 2})
    figures.put(metrics.OUTPUT_TOKENS, 2**53)
    figures.put(metrics.TTFT_SECONDS, histogram)
    figures.put(metrics.BUILD_INFO, {"version": "1"})
    got = samples(figures)
    assert got["microserving_requests_running", ()] == 3
    assert got["microserving_kv_pages", ("free",)] == 5
    assert got["microserving_output_tokens_total", ()] == 2**53
    bucket = "microserving_engine_ttft_seconds_bucket"
    assert [got[bucket, (bound,)] for bound in ("0.1", "1.0", "+Inf")] == [2, 3, 4]
    assert got["microserving_engine_ttft_seconds_count", ()] == 4
    assert got["microserving_engine_ttft_seconds_sum", ()] == pytest.approx(7.65)
    assert got["microserving_build_info", ("1",)] == 1
    assert got["microserving_metric_errors_total", ()] == 0


BAD: list[Any] = [-1, float("nan"), float("inf"), None, "5", [], True]


@pytest.mark.case("MT-01")
@pytest.mark.parametrize("metric", every_metric(), ids=lambda metric: metric.name)
def test_no_value_breaks_a_scrape(metric: MetricName) -> None:
    """Each metric is given each impossible value; the errors are counted and the others are shown."""
    figures = Figures()
    labels = ["x"] * len(metric.labels)
    wrong = [value for value in BAD if not (metric.kind == "gauge" and value == -1)]
    for value in wrong:
        figures.put(metric, value, *labels)
    figures.put(metric, 1, *labels, "one too many")
    figures.put(metrics.WAITING, 4)
    got = samples(figures)
    assert got["microserving_metric_errors_total", ()] == len(wrong) + 1
    assert got["microserving_requests_waiting", ()] == 4


@pytest.mark.case("MT-01")
def test_a_histogram_takes_anything() -> None:
    histogram = Histogram((1.0,))
    for value in (*BAD, -0.5, 2**63, 0):
        histogram.observe(value)
    assert (histogram.counts, histogram.errors) == ([1, 1], len(BAD) + 1)
    figures = Figures()
    figures.put(metrics.ITL_SECONDS, histogram)
    assert samples(figures)["microserving_metric_errors_total", ()] == histogram.errors


def test_a_copy_is_independent() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    copy = histogram.copy()
    histogram.observe(0.5)
    assert (copy.counts, copy.total) == ([1, 0], 0.5)
