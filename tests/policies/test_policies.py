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
    least_loaded,
    most_free_memory,
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
    total_pages=st.sampled_from([0, 100, 200]),
)
engine_lists = st.lists(st.tuples(st.integers(0, 4), loads), min_size=1, max_size=6).map(
    lambda items: [Engine(f"e{i}", in_flight, load) for i, (in_flight, load) in enumerate(items)]
)
turns = st.integers(0, 100)


@given(engine_lists, turns)
def test_round_robin_takes_each_in_order(engines: list[Engine], turn: int) -> None:
    chosen = [round_robin(engines, turn + i) for i in range(len(engines))]
    first = engines.index(chosen[0])
    assert chosen == engines[first:] + engines[:first]


@given(engine_lists, turns)
def test_least_loaded_has_no_better_engine(engines: list[Engine], turn: int) -> None:
    chosen = least_loaded(engines, turn)
    assert not [engine for engine in engines if engine.in_flight < chosen.in_flight]


@given(engine_lists, turns)
def test_most_free_memory_has_no_better_engine(engines: list[Engine], turn: int) -> None:
    def free(engine: Engine) -> float:
        load = engine.load
        return 0.0 if load.total_pages == 0 else (load.free_pages + load.cached_pages) / load.total_pages

    chosen = most_free_memory(engines, turn)
    assert free(chosen) == max(map(free, engines))
    equal = [engine for engine in engines if free(engine) == free(chosen)]
    assert chosen.in_flight == min(engine.in_flight for engine in equal)


@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 6), st.integers(1, 10), turns)
def test_equal_engines_share_evenly(name: str, count: int, rounds: int, first_turn: int) -> None:
    engines = [Engine(f"e{i}") for i in range(count)]
    chosen = Counter(POLICIES[name](engines, first_turn + i).id for i in range(count * rounds))
    assert set(chosen.values()) == {rounds}


@pytest.mark.case("RT-01")
def test_load_decides_before_turn() -> None:
    """An engine that is drowning gets nothing while another one is idle, whoever's turn it is."""
    drowning, idle = Engine("a", in_flight=50), Engine("b")
    assert [least_loaded([drowning, idle], turn).id for turn in range(10)] == ["b"] * 10


def test_registry_names_are_the_functions() -> None:
    assert {name: policy.__name__ for name, policy in POLICIES.items()} == {name: name for name in POLICIES}  # type: ignore[attr-defined]
