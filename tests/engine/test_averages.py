"""The line that fades, against numpy's least squares with the same weights."""

from __future__ import annotations

import numpy as np
import pytest

from microserving.engine.averages import Line


@pytest.mark.parametrize("kept", [1.0, 0.9, 0.3])
def test_a_line_is_the_weighted_least_squares(kept: float) -> None:
    rng = np.random.default_rng(5)
    x = rng.integers(1, 40, 30).astype(float)
    y = 3.0 + 0.5 * x + rng.normal(0.0, 1.0, 30)
    line = Line(least_spread=1e-9)
    assert not line.known
    for at, seen in zip(x, y, strict=True):
        line.observe(at, seen, kept)
    weights = kept ** np.arange(29, -1, -1)
    slope, intercept = np.polyfit(x, y, 1, w=np.sqrt(weights))
    assert line.known
    assert line.slope == pytest.approx(slope, rel=1e-6)
    assert line.mean_y - line.slope * line.mean_x == pytest.approx(intercept, rel=1e-6)


def test_one_x_alone_says_nothing_of_the_slope() -> None:
    line = Line(least_spread=1.0)
    for seen in (4.0, 6.0, 5.0):
        line.observe(7.0, seen, kept=1.0)
    assert (line.mean_x, line.mean_y, line.slope) == (7.0, pytest.approx(5.0), 0.0)
