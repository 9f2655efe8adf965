"""The figures of the comparison of patterns, from reports whose ratios are known."""

from __future__ import annotations

from typing import Any

import patterns
import pytest

RATES = (0.2, 0.4, 0.5)
JCT = {
    patterns.DATA_PARALLEL: (4.0, 5.0, 6.0),
    patterns.PLAIN: (4.0, 10.0, 13.0),
    "balanced 0.1": (4.2, 8.0, 9.0),
    "balanced 0.2": (4.4, 7.5, 8.0),
    patterns.AUTO: (4.1, 7.2, 8.8),
}


def report(labels: tuple[str, ...] = tuple(JCT), rates: tuple[float, ...] = RATES) -> dict[str, Any]:
    runs = []
    for label in labels:
        for index, rate in enumerate(rates):
            tpot = {patterns.PLAIN: 0.02, patterns.DATA_PARALLEL: 0.08}.get(label, 0.03) * (1 + index)
            latencies = {
                name: {"count": 60, "mean": mean, "p99": p99}
                for name, mean, p99 in (("jct", JCT[label][index], 99.0), ("tpot", 99.0, tpot))
            }
            runs.append({"label": label, "rate": rate, "summary": {"latencies": latencies}})
    return {"runs": runs}


def test_the_figures_are_of_the_rate_just_below_the_knee() -> None:
    """At 0.4 plain 1P1D takes 2.5 times what it takes at 0.2, at 0.5 more than three times."""
    found = patterns.figures(report())
    assert found["rate_below_knee"] == 0.4
    assert found["p99_tpot_ratio_pd_vs_dp"] == pytest.approx(0.25)
    assert found["mean_jct_ratio_balanced_vs_pd"] == pytest.approx(0.75)
    assert found["mean_jct_ratio_auto_vs_best"] == pytest.approx(0.96)
    assert found["mean_jct_ratio_auto_vs_best_by_rate"] == pytest.approx(
        {0.2: 4.1 / 4.0, 0.4: 0.96, 0.5: 1.1}
    )


def test_a_lucky_run_beyond_the_knee_is_not_below_it() -> None:
    measured = report()
    for run in measured["runs"]:
        if run["label"] == patterns.PLAIN and run["rate"] == 0.4:
            run["summary"]["latencies"]["jct"]["mean"] = 14.0
        if run["label"] == patterns.PLAIN and run["rate"] == 0.5:
            run["summary"]["latencies"]["jct"]["mean"] = 11.0
    assert patterns.figures(measured)["rate_below_knee"] == 0.2


def test_a_run_that_was_ended_early_has_the_figures_that_it_can_have() -> None:
    found = patterns.figures(report((patterns.PLAIN, patterns.DATA_PARALLEL), (0.2,)))
    assert found["p99_tpot_ratio_pd_vs_dp"] == pytest.approx(0.25)
    assert found["mean_jct_ratio_balanced_vs_pd"] is None
    assert patterns.figures({"runs": []}) == {}


def test_patterns_differ_in_what_they_should() -> None:
    quick, whole = (
        patterns.candidates(patterns.parse(["--cores", "0,1", *more])) for more in (["--quick"], [])
    )
    assert [one.label for one in whole] == [*(one.label for one in quick), patterns.ONE]
    assert len({id(one.config) for one in whole}) == 3
    for one in whole:
        pinned = [node.resources.pinned_to for node in one.config.nodes]
        assert sorted(map(len, filter(None, pinned))) == ([2] if one.label == patterns.ONE else [1, 1])
        assert frozenset().union(*filter(None, pinned)) == {0, 1}
        assert one.config.engine["prefix_cache"] == "off"
    assert [one.program.settings for one in whole if one.program][2:] == [
        {"pd_balance_factor": factor} for factor in (0.1, 0.2, "auto")
    ]
