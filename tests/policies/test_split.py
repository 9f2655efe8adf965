"""The split of a prompt between two engines: worked out by hand, and against the textbook's queues."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.policies import Arrivals, Demand, EngineLoad, balanced_end
from microserving.policies.demand import MAX_OUTPUT_TOKENS, WAITING
from microserving.policies.split import HORIZON, NO_MATTER, SHARES, STRETCH, Pair, mean_s, wait_s

rates = st.floats(10, 5000)
demands = st.builds(
    Demand,
    rate=st.floats(0, 50),
    tokens=st.floats(1, 5000),
    variation=st.floats(0, 4),
    output_tokens=st.floats(0, 256),
)


def engine(rate: float = 0.0, step_ms: float = 0.0) -> EngineLoad:
    return EngineLoad(prefill_tokens_per_s=rate, decode_step_ms=step_ms)


def test_the_wait_is_that_of_the_textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pollaczek and Khinchine's rho s (1 + variation) / (2 (1 - rho)): half of a 1 s service at half use is 0.5 s."""
    assert wait_s(0.0, 1.0, 0.0) == 0.0
    assert wait_s(0.5, 1.0, 0.0) == pytest.approx(0.5, rel=0.03)
    assert wait_s(0.5, 1.0, 1.0) == pytest.approx(1.0, rel=0.05)
    assert wait_s(0.05, 10.0, 0.0) == pytest.approx(5.0, rel=0.03)
    # One a second of 2 s each: the queue grows by a second a second, in the mean over the time it is half of that.
    assert wait_s(1.0, 2.0, 0.0) == pytest.approx(HORIZON / 2, rel=0.1)  # smooth: a little above
    monkeypatch.setattr("microserving.policies.split.HORIZON", 100_000)
    assert wait_s(0.9, 1.0, 0.5) == pytest.approx(0.9 * 1.5 / (2 * 0.1), rel=0.01)


def test_the_time_of_a_request() -> None:
    """Nobody else: 800 tokens at 400/s, 200 at 100/s, 10 steps of 50 ms."""
    one = Demand(tokens=1000, output_tokens=10)
    assert mean_s(Pair(400, 100, STRETCH, 0.05, 0.0, one, one), 0.2) == pytest.approx(2.0 + 2.0 + 0.5)
    assert mean_s(Pair(400, 100, STRETCH, 0.05, 0.0, one, one), 0.0) == pytest.approx(2.5 + 0.5)


def test_others_on_the_decode_engine() -> None:
    """Half a request a second at the decode engine alone: its use is 0.5 * 0.5 s = 1/4, an output of 0.3 s takes 4/3 as
    long, 0.4 s; so outputs run for 0.2 of the time, and the part takes 1 + 0.2 / 1.5 times 0.5 s."""
    here, there = Demand(tokens=1000, output_tokens=10), Demand(0.5, 1000, output_tokens=10)
    part = 0.5 * (1 + 0.2 / (STRETCH - 1))
    expected = 2.0 + part + wait_s(0.5, part, 0.0) + 0.4
    assert mean_s(Pair(400, 400, STRETCH, 0.03, 0.0, here, there), 0.2) == pytest.approx(expected)


def test_prompt_tokens_stretch_a_step_as_the_engine_tells() -> None:
    """Twice: a step is half outputs, half prompt, so a part of 1 s takes 2 s beside outputs."""
    came = Demand(1.0, 1000, output_tokens=10)
    expected = wait_s(1.0, 2.0, 0.0) + 2.0 + wait_s(0.5, 2.0, 0.0) + 2.0 + 2.0
    assert mean_s(Pair(250, 500, 2.0, 0.1, 0.0, came, came), 0.5) == pytest.approx(expected)


@pytest.mark.parametrize(("told", "counts_as"), [(0.0, STRETCH), (0.5, 1.2), (1.5, 1.5), (1e12, 10.0)])
def test_a_told_stretch_counts_within_bounds(told: float, counts_as: float) -> None:
    came = Demand(0.9, 1000, output_tokens=100)
    decode = EngineLoad(prefill_tokens_per_s=600, decode_base_ms=20, mixed_step_stretch=told)
    shares = [step / SHARES for step in range(SHARES + 1)]
    times = [mean_s(Pair(1000, 600, counts_as, 0.02, 0.0, came, came), share) for share in shares]
    best = next(
        share for share, time in zip(shares, times, strict=True) if time <= (1 + NO_MATTER) * min(times)
    )
    assert balanced_end(1000, 0, engine(1000), decode, came, came) == min(999, 1000 - round(best * 1000))


def test_each_engine_has_a_queue_of_its_own() -> None:
    """Half of a prompt of 1,000 here is 2.5 s; there it is 5 s, but of those that come there 2 s."""
    here, there = Demand(0.1, 1000, variation=0.5), Demand(0.2, 400, variation=2.0)
    expected = wait_s(0.1, 2.5, 0.5) + 2.5 + wait_s(0.2, 2.0, 2.0) + 5.0
    assert mean_s(Pair(200, 100, STRETCH, 0.0, 0.0, here, there), 0.5) == pytest.approx(expected)


def test_what_does_not_get_through_the_prefill_engine_does_not_come_to_the_other() -> None:
    """One a second, of which the prefill engine does half: parts of 1 s keep the decode engine half busy, and an output of
    1 s takes 2 s; then outputs run all the time."""
    came = Demand(1.0, 1000, output_tokens=10)
    slower = 1 + 1 / (STRETCH - 1)
    expected = wait_s(1.0, 2.0, 0.0) + 2.0 + wait_s(0.5, slower, 0.0) + slower + 2.0
    assert mean_s(Pair(250, 500, STRETCH, 0.1, 0.0, came, came), 0.5) == pytest.approx(expected)


def test_parts_make_an_output_no_longer_than_the_engine_lets_them() -> None:
    came = Demand(1.0, 1000, output_tokens=10)
    slower = 1 + 1 / (STRETCH - 1)
    expected = wait_s(1.0, 2 * slower, 0.0) + 2 * slower + STRETCH
    assert mean_s(Pair(1e9, 500, STRETCH, 0.1, 0.0, came, came), 1.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "matched", "prefill", "decode", "end"),
    [
        pytest.param(1000, 900, engine(100), engine(100), 900, id="most is cached"),
        pytest.param(1000, 1000, engine(100), engine(100), 999, id="all is cached"),
        pytest.param(1000, 0, engine(), engine(), 999, id="nothing was measured yet"),
        pytest.param(1000, 0, engine(100), engine(), 999, id="one rate is known"),
        pytest.param(1000, 0, engine(), engine(100), 999, id="the other one is known"),
        pytest.param(1000, 0, engine(100), engine(50), 999, id="nobody waits"),
        pytest.param(1000, 200, engine(100), engine(50), 999, id="that, and some is cached"),
        pytest.param(
            1000, 0, engine(100), engine(100.5), 999, id="a decode engine that is no faster to speak of"
        ),
        pytest.param(1000, 0, engine(100), engine(300), 0, id="one that is"),
        pytest.param(1000, 100, engine(100), engine(300), 100, id="that, and some is cached there"),
        pytest.param(1000, 0, engine(1e-300), engine(100), 999, id="a rate that is none"),
        pytest.param(1000, 0, engine(1e9), engine(1e-3), 999, id="the least one"),
        pytest.param(1, 0, engine(100), engine(100), 0, id="one token"),
        pytest.param(2, 0, engine(100), engine(100), 1, id="two tokens"),
    ],
)
def test_a_prompt_alone(tokens: int, matched: int, prefill: EngineLoad, decode: EngineLoad, end: int) -> None:
    alone = Demand(tokens=max(0, tokens - matched), output_tokens=10)
    assert balanced_end(tokens, matched, prefill, decode, alone, alone) == end


def test_prompts_of_others_do_not_change_what_a_prompt_takes() -> None:
    """Nobody waits: shorter or longer ones at the decode engine are no reason to move any."""
    long, short = Demand(tokens=1000), Demand(tokens=190)
    assert balanced_end(1000, 0, engine(100), engine(100), long, short) == 999
    assert balanced_end(1000, 0, engine(100), engine(50), long, short) == 999
    assert balanced_end(1000, 0, engine(100), engine(100), short, long) == 999


def test_next_to_nothing_is_not_handed_over() -> None:
    """However fast the decode engine is, the prefill engine has a tenth or nothing."""
    ends = set()
    for rate in range(100, 400, 2):
        came = Demand(0.12, 1000)
        ends.add(balanced_end(1000, 0, engine(100), engine(rate), came, came))
    assert 0 in ends
    assert min(ends - {0}) >= 100


def test_more_is_moved_the_more_requests_come() -> None:
    """Up to where both engines are as busy: without outputs, 1 / (1 + 100 / 50) of a prompt is the decode engine's part."""
    ends = []
    for rate in (0.01, 0.05, 0.08, 0.1, 0.15, 1.0, 100.0):
        came = Demand(rate, 1000)
        ends.append(balanced_end(1000, 0, engine(100), engine(50), came, came))
    assert ends[0] == 999
    assert ends == sorted(ends, reverse=True)
    assert ends[2] < 900
    assert ends[-1] == pytest.approx(667, abs=60)  # less than all, as about as good (NO_MATTER)


def test_outputs_and_other_prompts_keep_it_on_the_prefill_engine() -> None:
    def end(step_ms: float, on_decode: float = 0.09) -> int:
        came, there = Demand(0.09, 1000, output_tokens=200), Demand(on_decode, 1000, output_tokens=200)
        return balanced_end(1000, 0, engine(100), engine(100, step_ms), came, there)

    assert end(0.0) < end(20.0) < 950
    assert end(20.0) < end(20.0, on_decode=0.5)


@given(st.integers(1, 600), st.integers(0, 700), rates, rates, st.floats(0, 1e12), demands, demands)
def test_every_split_is_a_legal_one(
    tokens: int, matched: int, p: float, d: float, step_ms: float, first: Demand, second: Demand
) -> None:
    end = balanced_end(tokens, matched, engine(p), engine(d, step_ms), first, second)
    assert 0 <= end <= tokens - 1
    assert end >= min(matched, tokens - 1)


def test_outputs_that_make_each_other_longer() -> None:
    """An output of 100 steps of 5 ms and 5 ms for each output: at one a second it takes 2 s, as it meets two others, for
    100 * (5 + 5 * 3) ms = 2 s. At three a second they would wait for each other without end."""
    here, there = Demand(tokens=1000, output_tokens=100), Demand(1.0, 0, output_tokens=100)
    assert mean_s(Pair(100, 100, STRETCH, 0.005, 0.005, here, there), 0.0) == pytest.approx(10.0 + 2.0)
    assert mean_s(Pair(100, 100, STRETCH, 0.0, 0.005, here, there), 0.0) == pytest.approx(10.0 + 1.0)
    there = Demand(3.0, 0, output_tokens=100)
    assert mean_s(Pair(100, 100, STRETCH, 0.005, 0.005, here, there), 0.0) == pytest.approx(
        10 + 100 * 0.005 * 33
    )


def test_a_step_that_prompts_made_longer_counts_where_no_other_is_known() -> None:
    came = Demand(0.09, 1000, output_tokens=100)

    def end(decode: EngineLoad) -> int:
        return balanced_end(1000, 0, engine(100), decode, came, came)

    both = EngineLoad(prefill_tokens_per_s=100, decode_step_ms=50, decode_base_ms=20)
    assert end(both) == end(engine(100, 20)) < end(engine(100, 50))


def test_what_came_of_late() -> None:
    arrivals = Arrivals()
    assert arrivals.demand(0.0, 100.0) == Demand()
    for at in (0.0, 1.0, 4.0):
        arrivals.add(at, 100 if at else 400, 10)
    few = arrivals.demand(4.0, 100.0)
    assert (few.rate, few.tokens, few.variation, few.output_tokens) == (0.0, 100.0, 0.0, 10.0)
    arrivals.add(6.0, 200, 100_000)  # a bound, not an output
    four = arrivals.demand(6.0, 100.0)
    assert (four.rate, four.output_tokens) == (0.5, (30 + MAX_OUTPUT_TOKENS) / 4)
    assert four.tokens == pytest.approx(400 / 3), "without the longest"
    assert four.variation == pytest.approx((2 * (100 / 3) ** 2 + (200 / 3) ** 2) / 3 / (400 / 3) ** 2)
    assert arrivals.demand(6.0, 100.0, waiting=2.0).rate == (3 + 2 * WAITING) / 6


def test_one_long_prompt_is_no_sign_of_many() -> None:
    """After a few short ones it goes to the prefill engine as a whole, while nobody waits."""
    arrivals = Arrivals()
    for at in (0.0, 3.0, 6.0, 9.0):
        arrivals.add(at, 60, 10)
    arrivals.add(20.0, 8191, 10)
    came = arrivals.demand(20.0, 270.0)
    assert balanced_end(8191, 0, engine(270), engine(270, 20), came, came) == 8190


def test_what_came_long_ago_says_nothing_of_a_burst() -> None:
    arrivals = Arrivals()
    for _ in range(40):
        arrivals.add(0.0, 100, 10)
    assert arrivals.demand(31.0, 0.0).rate == pytest.approx(1.0), "32 of 1 s each"
    assert arrivals.demand(31.0, 100.0).rate == pytest.approx(1.0)
    for at in (3600.0, 3601.0, 3602.0, 3603.0):
        arrivals.add(at, 200, 20)
    assert arrivals.demand(3603.0, 100.0) == Demand(1.0, 200.0, 0.0, 20.0)


def test_the_rate_of_poisson_arrivals() -> None:
    arrivals, draw, now, told = Arrivals(), random.Random(0), 0.0, []
    for number in range(3000):
        now += draw.expovariate(2.0)
        arrivals.add(now, 100, 10)
        if number > 40:
            told.append(arrivals.demand(now, 50.0).rate)
    assert sum(told) / len(told) == pytest.approx(2.0, rel=0.1)


def test_many_at_once_come_at_no_infinite_rate() -> None:
    arrivals = Arrivals()
    for _ in range(10):
        arrivals.add(5.0, 100, 10)
    assert arrivals.demand(5.0, 100.0).rate == pytest.approx(9 / 1e-3)
