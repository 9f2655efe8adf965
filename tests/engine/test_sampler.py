"""The sampler against values worked out by hand and by slower, independent ways."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.engine.sampler import SamplingRow, sample, uniform
from microserving.errors import InternalError
from microserving.protocol.generation import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def pick(
    logits: list[float], params: SamplingParams, tokens: list[int] | None = None, prompt_length: int = 0
) -> int | InternalError:
    row = SamplingRow(params, tokens or [], prompt_length)
    return sample(np.array([logits], np.float32), [row], len(logits))[0]


def test_greedy_takes_the_highest_and_of_equals_the_lowest_id() -> None:
    assert pick([0.0, 3.0, 3.0, 1.0], GREEDY) == 1
    assert pick([0.0, 3.0, 3.0, 1.0], SamplingParams(temperature=9e-6)) == 1


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    params = replace(GREEDY, repetition_penalty=2.0)
    assert pick([4.0, 3.0, 1.0], params, [0]) == 1  # 2, 3, 1: a prompt token counts
    assert pick([-1.0, -1.5, -9.0], params, [0], prompt_length=1) == 1  # -2, -1.5, -9
    assert pick([4.0, 1.5, 1.0], params, [0, 0, 0]) == 0  # once, however often it was seen


def test_presence_and_frequency_count_the_output_only() -> None:
    tokens = [0, 0, 1, 1, 2]  # prompt 0, 0; output 1, 1, 2
    frequency = replace(GREEDY, frequency_penalty=1.0)
    assert pick([0.0, 2.5, 1.4], frequency, tokens, 2) == 1  # 0, 0.5, 0.4
    assert pick([0.6, 2.5, 1.4], frequency, tokens, 2) == 0
    presence = replace(GREEDY, presence_penalty=2.0)
    assert pick([0.0, 2.5, 1.4], presence, tokens, 2) == 1  # 0, 0.5, -0.6
    assert pick([0.6, 2.5, 1.4], presence, tokens, 2) == 0


def test_logit_bias_comes_after_the_penalties() -> None:
    params = replace(GREEDY, repetition_penalty=2.0, logit_bias={0: 3.0})
    assert pick([2.0, 3.9], params, [0]) == 0  # 2 / 2 + 3 = 4; the other order would give 2.5
    assert pick([5.0, 1.0, 0.0], replace(GREEDY, logit_bias={0: -100.0})) == 1


def probabilities(logits: list[float], params: SamplingParams, rounds: int = 4000) -> list[float]:
    row = np.array([logits], np.float32)
    counts: Counter[object] = Counter()
    for position in range(rounds):
        counts[sample(row, [SamplingRow(params, [0] * position, 0)], len(logits))[0]] += 1
    return [counts[i] / rounds for i in range(len(logits))]


def test_the_distribution_is_the_softmax_of_the_tempered_logits() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert probabilities(logits, SamplingParams(seed=3)) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    squared = [0.25, 0.09, 0.0225, 0.0025]  # temperature 0.5
    expected = [p / sum(squared) for p in squared]
    assert probabilities(logits, SamplingParams(temperature=0.5)) == pytest.approx(expected, abs=0.03)


def support(logits: list[float], params: SamplingParams) -> set[int]:
    return {i for i, p in enumerate(probabilities(logits, params, 600)) if p}


def test_what_the_filters_leave() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.1, 0.25, 0.15)]
    assert support(logits, SamplingParams(top_k=2)) == {1, 3}
    assert support(logits, SamplingParams(top_p=0.6)) == {1, 3}  # 0.4, 0.65: the one that crosses is kept
    assert support(logits, SamplingParams(top_p=0.7)) == {1, 3, 4}
    assert support(logits, SamplingParams(min_p=0.5)) == {1, 3}  # at least 0.2
    assert support(logits, SamplingParams(top_k=4)) == {0, 1, 3, 4}  # of the equals 0 and 2 the lower id
    assert support(logits, SamplingParams(top_p=1e-9)) == {1}
    assert support(logits, SamplingParams(top_k=3, top_p=0.8)) == {1, 3}  # 0.4/0.8 + 0.25/0.8 > 0.8


def reference(logits: npt.NDArray[np.float32], params: SamplingParams, u: float) -> int:
    """The same by plain Python: sort all, cut, walk the CDF."""
    scores = [float(x) / params.temperature for x in logits]
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weights = {i: math.exp(scores[i] - scores[order[0]]) for i in order}
    total, running, kept = math.fsum(weights.values()), 0.0, []
    for i in order:
        if params.top_p < 1.0 and running >= params.top_p * total:
            break
        kept.append(i)
        running += weights[i]
    kept = [i for i in kept if weights[i] >= params.min_p * weights[kept[0]]]
    target, running = u * math.fsum(weights[i] for i in kept), 0.0
    for i in sorted(kept):
        running += weights[i]
        if running > target:
            return i
    return max(kept)


@settings(max_examples=200)
@given(
    st.integers(0, 2**32),
    st.integers(1, 200),
    st.floats(0.1, 5.0),
    st.integers(0, 50),
    st.floats(0.01, 1.0),
    st.sampled_from([0.0, 0.01, 0.2]),
)
def test_it_equals_the_plain_way(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    got = sample(logits[None], [SamplingRow(params, [0] * 7, 0)], size)
    assert got == [reference(logits, params, uniform(seed, 7))]


@pytest.mark.case("API-45")
def test_a_token_depends_on_its_own_row_seed_and_position_only() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (16, 100)).astype(np.float32)
    rows = [SamplingRow(SamplingParams(seed=42 + i, top_p=0.9), [1] * i, 0) for i in range(16)]
    together = sample(logits, rows, 100)
    assert together == [sample(logits[i : i + 1], [rows[i]], 100)[0] for i in range(16)]
    flat = np.zeros((1, 1000), np.float32)
    by_seed = [
        sample(flat, [SamplingRow(SamplingParams(seed=s), [], 0)], 1000)[0] for s in (42, 43, 2**64 - 1)
    ]
    by_position = [
        sample(flat, [SamplingRow(SamplingParams(seed=42), [0] * n, 0)], 1000)[0] for n in range(3)
    ]
    assert len({*by_seed, *by_position}) == 5


def test_the_uniform_numbers_are_philox_and_uniform() -> None:
    assert uniform(0, 0) == (int(np.random.Philox(key=0, counter=0).random_raw()) >> 11) / 2**53
    numbers = np.array([uniform(7, n) for n in range(4000)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001


@pytest.mark.case("TK-05")
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, top_k=3)])
def test_padded_rows_are_never_sampled(params: SamplingParams) -> None:
    logits = np.zeros((1, 1024), np.float32)
    logits[0, 1000:] = np.inf
    for position in range(50):
        token = sample(logits, [SamplingRow(params, [0] * position, 0)], 1000)[0]
        assert isinstance(token, int)
        assert token < 1000


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5, repetition_penalty=1.3)]
)
@pytest.mark.parametrize("bad", [[math.nan, 1.0], [1.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0]])
def test_unusable_logits_fail_their_own_row_only(params: SamplingParams, bad: list[float]) -> None:
    logits = np.array([[0.0, 9.0], bad, [9.0, 0.0]], np.float32)
    first, middle, last = sample(
        logits, [SamplingRow(GREEDY, [], 0), SamplingRow(params, [0], 1), SamplingRow(GREEDY, [], 0)], 2
    )
    assert (first, last) == (1, 0)
    assert isinstance(middle, InternalError)


def test_a_token_at_minus_infinity_is_never_sampled() -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    assert support(logits, SamplingParams()) == {1, 3}
    assert support(logits, SamplingParams(top_p=0.99, top_k=4)) == {1, 3}


def test_the_logits_are_not_changed() -> None:
    logits = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    before = logits.copy()
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={3: 5.0}, top_p=0.5)
    sample(logits, [SamplingRow(params, [1, 2, 3], 1)], 50)
    assert (logits == before).all()


def test_history_beyond_the_vocabulary_is_ignored() -> None:
    params = replace(GREEDY, repetition_penalty=1.5, presence_penalty=1.0)
    assert pick([0.0, 1.0], params, [5, 7], prompt_length=1) == 1
