"""The prompt tokens of a step that has decodes, against machines whose costs are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.engine.pacing import (
    DECODE_STEPS,
    FLOOR_TOKENS,
    MEASURE_EVERY,
    MEASURE_EVERY_AT_FIRST,
    Pacer,
    TokenCost,
)

MOST = 256


class Machine:
    """A step takes decode_s for its decodes, per prompt token ``first + slope * position``, and ``any_s`` once if it has
    any."""

    def __init__(self, decode_s: float, first: float, slope: float, any_s: float = 0.0) -> None:
        self.decode_s, self.first, self.slope, self.any_s = decode_s, first, slope, any_s

    def seconds(self, position: int, tokens: int) -> float:
        once = self.decode_s + self.any_s * (tokens > 0)
        return once + sum(self.first + self.slope * (position + i) for i in range(tokens))


def prefill(
    pacer: Pacer, machine: Machine, prompt: int, noise: Callable[[], float] = lambda: 1.0
) -> list[tuple[int, float]]:
    """(tokens, seconds) of each step until the prompt is computed beside 4 decodes."""
    steps, position = [], 0
    while position < prompt:
        tokens = min(pacer.budget(4, position, MOST), prompt - position)
        seconds = machine.seconds(position, tokens) * noise()
        pacer.observe(4, tokens, position + tokens / 2, seconds)
        steps.append((tokens, seconds))
        position += tokens
        assert len(steps) < 10_000, "the prompt starves"
    return steps


@pytest.mark.parametrize("slope", [0.0, 0.5e-6, 2e-6])
@pytest.mark.parametrize("first", [0.2e-3, 1e-3, 1.8e-3])
def test_a_step_takes_at_most_the_ratio_and_not_much_less(first: float, slope: float) -> None:
    """20 ms of decodes and the budget 2.5: 30 ms of prompt tokens; the floor is 4 tokens."""
    pacer, machine = Pacer(2.5), Machine(0.020, first, slope)
    steps = prefill(pacer, machine, 3000)
    whole = [
        (i, tokens, seconds) for i, (tokens, seconds) in enumerate(steps[:-1]) if FLOOR_TOKENS < tokens < MOST
    ]
    assert all(seconds < 0.020 * 2.5 * 1.07 for _, tokens, seconds in whole)
    settled = [seconds for i, _, seconds in whole if i > 12]
    assert not settled or sorted(settled)[len(settled) // 2] > 0.020 * 2.5 * 0.85


def test_noise_and_hiccups_do_not_lead_astray() -> None:
    chance = random.Random(3)
    pacer, machine = Pacer(2.5), Machine(0.020, 1e-3, 0.5e-6)

    def noise() -> float:
        return 30.0 if chance.random() < 0.01 else chance.uniform(0.9, 1.1)

    for _ in range(20):
        steps = prefill(pacer, machine, 3000, noise)
    long = [seconds for _, seconds in steps if seconds > 0.020 * 3]
    assert len(long) <= 0.03 * len(steps)


def test_what_the_first_prompt_token_of_a_step_costs_extra_is_not_taken_for_the_decodes() -> None:
    """18 of the 30 ms go to it, so at most 12 tokens of 1 ms are left, however often the decodes are measured again."""
    pacer, machine = Pacer(2.5), Machine(0.020, 1e-3, 0.0, any_s=0.018)
    steps = prefill(pacer, machine, 6000)
    assert sum(tokens == 0 for tokens, _ in steps) > 2 * DECODE_STEPS
    assert max(seconds for tokens, seconds in steps if tokens > 2 * FLOOR_TOKENS) < 0.020 * 2.6
    assert 9 <= sorted(tokens for tokens, _ in steps)[len(steps) // 2] <= 12


def test_without_decodes_a_prompt_gets_the_whole_step() -> None:
    assert Pacer(2.5).budget(0, 0, MOST) == MOST


def test_decodes_that_were_never_measured_are_measured_first() -> None:
    pacer = Pacer(2.5)
    assert pacer.budget(4, 0, MOST) == 0
    pacer.observe(4, 0, 0.0, 0.02)
    assert pacer.budget(4, 0, MOST) == FLOOR_TOKENS
    assert pacer.budget(4, 0, 3) == 3, "never beyond what the step may have"


def test_they_are_measured_again_now_and_then_and_when_their_number_changes() -> None:
    pacer = measured(0.02)
    for _ in range(MEASURE_EVERY):
        assert pacer.budget(4, 0, MOST) >= FLOOR_TOKENS
        pacer.observe(4, 8, 4.0, 0.03)
    assert pacer.budget(4, 0, MOST) == 0
    pacer.observe(4, 0, 0.0, 0.02)
    assert pacer.budget(4, 0, MOST) >= FLOOR_TOKENS
    pacer.observe(4, 8, 4.0, 0.03)
    assert pacer.budget(7, 0, MOST) >= FLOOR_TOKENS
    assert pacer.budget(8, 0, MOST) == 0
    assert pacer.budget(2, 0, MOST) == 0


def measured(*seconds: float) -> Pacer:
    """One that has seen steps of 4 decodes alone; one time stands for as many steps as are remembered."""
    pacer = Pacer(2.5)
    for each in seconds if len(seconds) > 1 else seconds * DECODE_STEPS:
        pacer.observe(4, 0, 0.0, each)
    return pacer


def test_the_first_measurement_does_not_stand_alone_for_long() -> None:
    """One step of decodes alone may have been anything: they are measured more often until there are five."""
    pacer = Pacer(2.5)
    pacer.observe(4, 0, 0.0, 0.02)
    for _ in range(DECODE_STEPS - 1):
        for _ in range(MEASURE_EVERY_AT_FIRST):
            assert pacer.budget(4, 0, MOST) >= FLOOR_TOKENS
            pacer.observe(4, 8, 4.0, 0.03)
        assert pacer.budget(4, 0, MOST) == 0
        pacer.observe(4, 0, 0.0, 0.02)
    for _ in range(MEASURE_EVERY_AT_FIRST):
        pacer.observe(4, 8, 4.0, 0.03)
    assert pacer.budget(4, 0, MOST) >= FLOOR_TOKENS


def test_a_hiccup_while_the_decodes_are_measured_is_forgotten() -> None:
    pacer = measured(0.02, 0.02, 0.6, 0.6, 0.02)
    steps = prefill(pacer, Machine(0.020, 1e-3, 0.0), 1000)
    assert max(seconds for _, seconds in steps) < 0.020 * 2.6


def test_prompt_tokens_that_seemed_free_do_not_stay_so() -> None:
    """A step with prompt tokens that took no longer than the decodes alone says nothing of what a token costs."""
    pacer = measured(0.02)
    pacer.observe(4, FLOOR_TOKENS, 4.0, 0.02)
    steps = prefill(pacer, Machine(0.020, 1e-3, 0.0), 1000)
    settled = [seconds for _, seconds in steps[4:-1]]
    assert max(settled) < 0.020 * 2.6


def test_a_step_that_was_much_too_long_shortens_the_next() -> None:
    """64 tokens took 640 ms where 30 ms were meant: 3 could have been afforded, and the next step has twice that."""
    pacer = measured(0.02)
    tokens = 0
    for _ in range(6):
        tokens = pacer.budget(4, 0, MOST)
        pacer.observe(4, tokens, 0.0, 0.02 + tokens * 1e-4)
    assert tokens >= 64
    pacer.observe(4, 64, 0.0, 0.66)
    assert pacer.budget(4, 0, MOST) == 6


@pytest.mark.parametrize("spread", [0.7, 1.2])
def test_on_a_busy_machine_few_steps_are_meant_too_long(spread: float) -> None:
    """Whatever the noise does to measurements: what the steps would take on a quiet machine counts."""
    chance, meant = random.Random(11), []
    machine = Machine(0.020, 1e-3, 0.3e-6)
    for _ in range(10):
        pacer = measured(*(0.020 * chance.lognormvariate(0, spread) for _ in range(20)))
        position = 0
        for tokens, _ in prefill(pacer, machine, 2000, lambda: chance.lognormvariate(0, spread)):
            meant.append(machine.seconds(position, tokens) / machine.decode_s)
            position += tokens
    meant.sort()
    assert meant[len(meant) // 2] < 2.5
    assert meant[int(0.95 * len(meant))] < 5.0


def test_a_slower_machine_gets_smaller_chunks() -> None:
    pacer = Pacer(2.5)
    prefill(pacer, Machine(0.020, 0.2e-3, 0.0), 2000)
    fast = pacer.budget(4, 0, MOST)
    prefill(pacer, Machine(0.020, 2e-3, 0.0), 2000)
    assert pacer.budget(4, 0, MOST) < fast / 4


def test_the_cost_is_a_line_over_the_position() -> None:
    cost = TokenCost()
    for position in range(0, 3000, 100):
        cost.observe(position, 1e-3 + 1e-6 * position)
    for position in (2000, 2900, 3200):
        assert math.isclose(cost.at(position), 1e-3 + 1e-6 * position, rel_tol=0.1)
    assert cost.at(0) >= 0.5e-3


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 5000), st.integers(0, MOST), st.floats(0.0, 10.0)),
        max_size=60,
    ),
    st.floats(1.01, 10.0),
)
def test_whatever_is_observed_prompts_go_on(steps: list[tuple[int, int, int, float]], ratio: float) -> None:
    """Of two steps in a row one has the floor, at least; none has more prompt tokens than it may."""
    pacer, waited = Pacer(ratio), False
    for decodes, position, tokens, seconds in steps:
        budget = pacer.budget(decodes, position, MOST)
        assert budget == MOST if decodes == 0 else 0 <= budget <= MOST
        assert budget >= FLOOR_TOKENS or not waited
        waited = budget < FLOOR_TOKENS
        pacer.observe(decodes, min(tokens, budget), float(position), seconds)
