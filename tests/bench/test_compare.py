"""Comparisons: of two reports, and of the patterns of one."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from microserving.bench.compare import compare, compare_patterns, ratio_interval
from microserving.bench.measurement import INTERRUPTED, Measured
from microserving.errors import ConfigError

from .reports import BOTH, LABELS, report, run


def test_compare_tells_what_changed() -> None:
    slower = report(run(LABELS[0], 0.5, 0.75), run("new", 0.5, 1.0), seed=1)
    text = compare(BOTH, slower)
    assert re.search(r"data parallel +0.5/s +JCT mean +500.0 ms +750.0 ms +1.500 +1.500 to 1.500", text)
    assert "only in A: 1P1D <&>, 0.5/s" in text
    assert "only in B: new, 0.5/s" in text
    assert "seed differs: A has 0, B has 1" in text
    with pytest.raises(ConfigError, match="A has x, 1/s; B has y, 1/s; z, 1/s"):
        compare(report(run("x", 1.0, 1.0)), report(run("y", 1.0, 1.0), run("z", 1.0, 1.0)))


def test_two_files_of_one_pattern_each_are_compared_whatever_they_are_called() -> None:
    text = compare(report(run("x", 1.0, 1.0), run("x", 2.0, 1.0)), report(run("y", 1.0, 1.5)))
    assert re.search(r"x -> y +1/s +JCT mean +1.00 s +1.50 s +1.500 ", text)
    assert "only in A: x -> y, 2/s" in text


def test_the_patterns_of_one_file_are_compared_with_one_of_them() -> None:
    text = compare_patterns(BOTH)
    assert text.startswith("A is data parallel, B the pattern named\n")
    for load in ("0.5/s", "1/s"):
        assert re.search(rf"1P1D <&> +{load} +JCT mean .* 2.000  2.000 to 2.000\n", text)
    assert not re.search("^data parallel", text, re.MULTILINE)
    assert re.search(r"data parallel +1/s +JCT mean .* 0.500 ", compare_patterns(BOTH, "1P1D <&>"))
    with pytest.raises(ConfigError, match="no pattern 'x', but 'data parallel', '1P1D <&>'"):
        compare_patterns(BOTH, "x")
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare_patterns(report(run("x", 1.0, 1.0)))


def test_the_same_requests_are_compared_one_by_one() -> None:
    """What a request costs by itself, as a long prompt, is no chance then; with other seeds or closed loops it is."""
    slow = [Measured(n, float(n), sent=float(n), completed=n + 0.5, ended=n + 1.0 + n % 5) for n in range(50)]
    slower = [replace(record, ended=(record.ended or 0.0) * 1.1 - record.scheduled * 0.1) for record in slow]

    def width(a: dict[str, Any], b: dict[str, Any]) -> float:
        (found,) = re.findall(r"JCT mean .*  (\S+) to (\S+)\n", compare(a, b))
        return float(found[1]) - float(found[0])

    def of(records: list[Measured], **more: Any) -> dict[str, Any]:
        return report(run("x", 1.0, 1.0) | {"requests": [record.as_dict() for record in records]}, **more)

    assert width(of(slow), of(slower)) < 0.001
    assert width(of(slow), of(slower, seed=1)) > 0.05


def test_compare_says_what_makes_it_unfair() -> None:
    late = Measured(50, 1.0, sent=9.0, error=INTERRUPTED)
    a = report(run("x", 1.0, 1.0), keep_load=True)
    cut = run("x", 1.0, 1.0, late) | {"arrivals": {"kind": "constant", "rate": 1.0}}
    text = compare(a, report(cut, keep_load=False))
    assert "B: x, 1/s: 1 of 10 had not ended when the run did" in text
    assert "A: x" not in text
    assert "x, 1/s: requests arrive otherwise in B" in text
    assert "keep_load differs: A has True, B has False" in text
    assert compare(a, a).count("\n") == 8  # a head and seven figures, nothing else


def test_what_was_measured_twice_is_compared_twice() -> None:
    text = compare(
        report(run("x", 1.0, 1.0), run("x", 1.0, 2.0)), report(run("x", 1.0, 2.0), run("x", 1.0, 2.0))
    )
    assert re.search(r"x +1/s +JCT mean .* 2.000 ", text)
    assert re.search(r"x +1/s \(2\) +JCT mean .* 1.000 ", text)


def held_of_60(count: int, alike: float) -> int:
    """How many of 60 intervals hold the true ratio of two means; alike: the correlation of neighbours."""
    draw, held = random.Random(4), 0

    def values(mean: float) -> list[float]:
        noise = [draw.gauss(0, 1)]
        while len(noise) < count:
            noise.append(alike * noise[-1] + draw.gauss(0, (1 - alike**2) ** 0.5))
        return [mean + one for one in noise]

    for trial in range(60):
        low, high = ratio_interval(values(5.0), values(6.0), trial) or (0.0, 0.0)
        held += low <= 1.2 <= high
    return held


def test_the_interval_holds_the_true_ratio_nearly_as_often_as_it_says() -> None:
    """Also when neighbours are alike, as requests that wait in one queue are: intervals for independent values hold it
    about 40 times then."""
    assert 51 <= held_of_60(60, 0.0) <= 60
    assert 48 <= held_of_60(100, 0.6) <= 60
    assert ratio_interval([1.0], [1.0, 2.0]) is None
