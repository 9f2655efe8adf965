"""Policies against a brute-force reading of what they promise."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.policies import (
    POLICIES,
    EngineLoad,
    Situation,
    least_loaded,
    most_free_memory,
    power_of_two,
    prefix_aware,
    prompt_length,
    round_robin,
)


@dataclass
class Engine:
    id: str
    in_flight: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)


loads = st.builds(
    EngineLoad,
    free_pages=st.integers(0, 50),
    cached_pages=st.integers(0, 50),
    pinned_pages=st.integers(0, 10),
    total_pages=st.sampled_from([0, 100, 200]),
)
engine_lists = st.lists(st.tuples(st.integers(0, 4), loads), min_size=1, max_size=6).map(
    lambda items: [Engine(f"e{i}", in_flight, load) for i, (in_flight, load) in enumerate(items)]
)
turns = st.integers(0, 100)


@given(engine_lists, turns)
def test_round_robin_takes_each_in_order(engines: list[Engine], turn: int) -> None:
    chosen = [round_robin(engines, Situation(turn + i)) for i in range(len(engines))]
    first = engines.index(chosen[0])
    assert chosen == engines[first:] + engines[:first]


@given(engine_lists, turns)
def test_least_loaded_has_no_better_engine(engines: list[Engine], turn: int) -> None:
    chosen = least_loaded(engines, Situation(turn))
    assert not [engine for engine in engines if engine.in_flight < chosen.in_flight]


@given(engine_lists, turns)
def test_most_free_memory_has_no_better_engine(engines: list[Engine], turn: int) -> None:
    def free(engine: Engine) -> float:
        load = engine.load
        evictable = load.cached_pages - min(load.cached_pages, load.pinned_pages)
        return 0.0 if load.total_pages == 0 else (load.free_pages + evictable) / load.total_pages

    chosen = most_free_memory(engines, Situation(turn))
    assert free(chosen) == max(map(free, engines))
    equal = [engine for engine in engines if free(engine) == free(chosen)]
    assert chosen.in_flight == min(engine.in_flight for engine in equal)


@given(
    st.sampled_from(sorted(set(POLICIES) - {"power_of_two"})), st.integers(1, 6), st.integers(1, 10), turns
)
def test_equal_engines_share_evenly(name: str, count: int, rounds: int, first_turn: int) -> None:
    engines = [Engine(f"e{i}") for i in range(count)]
    chosen = Counter(POLICIES[name](engines, Situation(first_turn + i)).id for i in range(count * rounds))
    assert set(chosen.values()) == {rounds}


@pytest.mark.case("RT-01")
def test_load_decides_before_turn() -> None:
    """An engine that is drowning gets nothing while another one is idle, whoever's turn it is."""
    drowning, idle = Engine("a", in_flight=50), Engine("b")
    assert [least_loaded([drowning, idle], Situation(turn)).id for turn in range(10)] == ["b"] * 10


def test_registry_names_are_the_functions() -> None:
    assert {name: policy.__name__ for name, policy in POLICIES.items()} == {name: name for name in POLICIES}  # type: ignore[attr-defined]


@given(engine_lists, turns)
def test_power_of_two_is_never_the_busiest_of_three(engines: list[Engine], turn: int) -> None:
    """Two different engines are drawn, so one that is busier than all others is never chosen."""
    chosen = power_of_two(engines, Situation(turn))
    assert chosen is power_of_two(engines, Situation(turn))
    busier = [engine for engine in engines if engine.in_flight >= chosen.in_flight and engine is not chosen]
    assert busier or len(engines) == 1


def test_power_of_two_draws_all_engines_about_as_often() -> None:
    engines = [Engine(f"e{i}") for i in range(5)]
    chosen = Counter(power_of_two(engines, Situation(turn)).id for turn in range(5000))
    assert min(chosen.values()) > 850
    assert max(chosen.values()) < 1150


def busy(engine_id: str, queued: int, rate: float, step_ms: float = 0.0) -> Engine:
    load = EngineLoad(queued_prefill_tokens=queued, prefill_tokens_per_s=rate, decode_step_ms=step_ms)
    return Engine(engine_id, load=load)


@pytest.mark.parametrize(
    ("length", "assigned", "chosen"),
    [
        # fast: (4000 + n) / 4000 s, then 64 steps of 50 ms; idle: n / 500 s, then 64 steps of 20 ms
        pytest.param(4000, {}, "fast", id="long: 2 s against 8 s"),
        pytest.param(50, {}, "idle", id="short: 1.4 s against 4.2 s"),
        pytest.param(512, {}, "idle", id="not yet worth the queue: 1.13 s against 1.02 s"),
        pytest.param(700, {}, "fast", id="1.18 s against 1.4 s"),
        pytest.param(700, {"fast": 4000}, "idle", id="a burst since the load was told: 2.18 s"),
    ],
)
def test_prompt_length_goes_by_rate_and_queue(length: int, assigned: dict[str, int], chosen: str) -> None:
    engines = [busy("fast", 4000, 4000, 50), busy("idle", 0, 500, 20)]
    for turn in range(4):
        assert prompt_length(engines, Situation(turn, length, assigned=assigned)).id == chosen


def test_an_engine_that_has_not_worked_yet_counts_as_the_fastest() -> None:
    engines = [busy("known", 10, 1000), busy("new", 0, 0)]
    assert prompt_length(engines, Situation(0, 100)).id == "new"
    assert prompt_length([busy("a", 5, 0), busy("b", 0, 0)], Situation(0, 100)).id == "b"


@pytest.mark.case("RT-01")
def test_without_a_hit_the_least_loaded_engine_is_chosen() -> None:
    """Whatever else it has cached."""
    drowning, idle = Engine("a", in_flight=50), Engine("b")
    chosen = [prefix_aware([drowning, idle], Situation(turn, 400)).id for turn in range(100)]
    assert chosen == ["b"] * 100


@pytest.mark.parametrize(
    ("in_flight", "chosen"),
    [
        ((0, 0, 0), "a"),
        ((1, 0, 0), "a"),  # half a prompt's worth: 1 / 2 < 360 / 400
        ((2, 0, 0), "b"),
        ((12, 9, 9), "a"),  # 3 above the idlest, the mean is 10: 0.3
        ((30, 9, 9), "b"),
    ],
)
def test_a_hit_is_worth_some_load(in_flight: tuple[int, int, int], chosen: str) -> None:
    engines = [Engine(name, count) for name, count in zip("abc", in_flight, strict=True)]
    assert prefix_aware(engines, Situation(0, 400, matched={"a": 360})).id == chosen
