"""When objectives call for a shift, and that they do not call back and forth."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.policies import ObjectiveWatch, Shift

SLOW_PROMPTS, SLOW_TOKENS, FINE, BOTH = (3.0, 0.05), (0.5, 0.3), (0.5, 0.05), (3.0, 0.3)
Round = tuple[float | None, float | None]


def decisions(rounds: Sequence[Round], patience: int = 2) -> list[Shift | None]:
    watch = ObjectiveWatch(ttft_s=2.0, itl_s=0.1, patience=patience)
    return [watch.decide(*measured) for measured in rounds]


def test_a_missed_objective_needs_patience_and_then_rest() -> None:
    assert decisions([SLOW_PROMPTS] * 8) == [None, "prefill", None, None, None, "prefill", None, None]
    assert decisions([SLOW_TOKENS] * 2) == [None, "decode"]


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param([FINE] * 10, id="both are met"),
        pytest.param([BOTH] * 10, id="both are missed: engines are lacking"),
        pytest.param([(3.0, 0.09)] * 10, id="the other side has nothing to give"),
        pytest.param([(1.7, 0.3)] * 10, id="nor has this one"),
        pytest.param([SLOW_PROMPTS, FINE] * 10, id="now and then"),
        pytest.param([SLOW_PROMPTS, SLOW_TOKENS] * 10, id="to and fro"),
        pytest.param([(None, None)] * 10, id="no traffic"),
    ],
)
def test_no_shift(rounds: list[Round]) -> None:
    assert decisions(rounds) == [None] * len(rounds)


def test_what_was_not_measured_counts_as_no_load() -> None:
    assert decisions([(3.0, None)] * 2) == [None, "prefill"]
    assert decisions([(None, 0.3)] * 2) == [None, "decode"]


@given(st.lists(st.sampled_from([SLOW_PROMPTS, SLOW_TOKENS, FINE, BOTH]), max_size=60), st.integers(1, 4))
def test_shifts_are_rare_and_for_a_reason(rounds: list[Round], patience: int) -> None:
    made = decisions(rounds, patience)
    at = [i for i, shift in enumerate(made) if shift is not None]
    for i in at:
        wanted = SLOW_PROMPTS if made[i] == "prefill" else SLOW_TOKENS
        assert rounds[i - patience + 1 : i + 1] == [wanted] * patience
    assert all(later - earlier >= 2 * patience for earlier, later in itertools.pairwise(at))
