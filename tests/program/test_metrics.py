from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.program import ClusterMetrics, Window


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_a_sample_that_enough_do_not_exceed(samples: list[float], q: float) -> None:
    window = Window(Clock(), 10.0)
    for sample in samples:
        window.add(sample)
    value = window.quantile(q)
    assert value in samples
    not_above = sum(sample <= value for sample in samples)
    below = sum(sample < value for sample in samples)
    assert not_above >= q * len(samples) > below - 1e-9 or value == min(samples)


def test_known_quantiles() -> None:
    window = Window(Clock(), 10.0)
    assert window.quantile(0.5) is None
    for value in [4.0, 1.0, 3.0, 2.0]:
        window.add(value)
    assert [window.quantile(q) for q in (0.0, 0.25, 0.5, 0.51, 0.9, 1.0)] == [1.0, 1.0, 2.0, 3.0, 4.0, 4.0]


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_no_quantile(q: float) -> None:
    with pytest.raises(ValueError, match="a quantile is in"):
        Window(Clock(), 10.0).quantile(q)


def test_old_samples_are_forgotten_and_all_are_bounded() -> None:
    clock = Clock()
    window = Window(clock, 10.0, max_samples=3)
    for value in [9.0, 1.0, 2.0, 3.0]:
        window.add(value)
        clock.now += 4.0
    assert len(window) == 2  # at 16 s: those of 8 s and 12 s
    assert window.quantile(1.0) == 3.0
    clock.now = 50.0
    assert window.quantile(0.5) is None


def test_samples_go_to_the_pools_of_the_role() -> None:
    metrics = ClusterMetrics(Clock())
    metrics.add_ttft("prefill", 1.0)
    metrics.add_ttft("decode", 2.0)
    metrics.add_ttft("hybrid", 3.0)
    metrics.add_itl("decode", 0.1)
    assert [len(pool.ttft) for pool in (metrics.prefill, metrics.decode, metrics.all)] == [2, 2, 3]
    assert [len(pool.itl) for pool in (metrics.prefill, metrics.decode, metrics.all)] == [0, 1, 1]
    metrics.clear()
    assert metrics.all.ttft.quantile(0.5) is None
