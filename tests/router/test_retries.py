"""How often, how soon, and for which failures a request is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.errors import (
    HTTP_STATUS,
    EngineUnavailable,
    KVExhausted,
    LeaseError,
    MicroservingError,
    NoEngine,
    Overloaded,
    Preempted,
    ShuttingDown,
    TransferFailed,
)
from microserving.router.retries import RetryBudget, RetrySettings, backoff_s, is_engines_fault

ENGINES = {
    EngineUnavailable,
    ShuttingDown,
    TransferFailed,
    LeaseError,
    Overloaded,
    KVExhausted,
    Preempted,
    NoEngine,
}


@pytest.mark.parametrize("error", HTTP_STATUS)
def test_whose_fault_each_error_is(error: type[MicroservingError]) -> None:
    made = ShuttingDown() if error is ShuttingDown else error("x")
    assert is_engines_fault(made) == (error in ENGINES)


@given(st.lists(st.booleans(), max_size=300), st.floats(0, 1), st.integers(0, 20))
def test_retries_never_exceed_burst_and_share(events: list[bool], share: float, burst: int) -> None:
    """True: a request comes; False: a retry is wanted."""
    budget = RetryBudget(RetrySettings(budget_share=share, budget_burst=burst))
    requests = retries = 0
    for comes in events:
        if comes:
            requests += 1
            budget.deposit()
        elif budget.withdraw():
            retries += 1
        assert retries <= burst + share * requests + 1e-6
        assert 0 <= budget.left <= burst


def test_pauses_double_and_spread() -> None:
    settings = RetrySettings(backoff_s=0.1, max_backoff_s=0.5)

    def most(low: float, high: float) -> float:
        assert low == 0.0
        return high

    assert [backoff_s(settings, n, most) for n in (1, 2, 3, 4, 9)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    assert backoff_s(RetrySettings(backoff_s=0.0), 1) == 0.0
