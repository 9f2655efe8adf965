"""An engine that fails request after request is tried now and then, until it serves again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from microserving.router.circuit import Circuit, CircuitSettings

SETTINGS = CircuitSettings(failures=3, pause_s=1.0, max_pause_s=4.0)


def test_it_opens_after_failures_in_a_row_and_lets_one_try() -> None:
    circuit = Circuit(SETTINGS)
    assert [circuit.failed(0.0), circuit.failed(0.0)] == [False, False]
    assert not circuit.succeeded()  # not in a row
    assert [circuit.failed(0.0), circuit.failed(0.0), circuit.failed(10.0)] == [False, False, True]
    assert not circuit.closed
    assert [circuit.state(t) for t in (10.0, 10.99, 11.0, 99.0)] == ["open", "open", "half_open", "half_open"]
    assert not circuit.failed(10.5)  # of a request that was under way
    assert circuit.state(11.0) == "half_open"
    assert circuit.succeeded()
    assert circuit.closed
    assert circuit.state(10.0) == "closed"


def test_the_pause_doubles_up_to_a_limit() -> None:
    circuit = Circuit(SETTINGS)
    now, pauses = 0.0, []
    for _ in range(2):
        circuit.failed(now)
    for _ in range(5):
        assert circuit.failed(now)
        begin = now
        while circuit.state(now) == "open":
            now += 0.5
        pauses.append(now - begin)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=60))
def test_whatever_happens_a_success_closes_it_and_a_pause_ends(events: list[tuple[bool, float]]) -> None:
    circuit, now = Circuit(SETTINGS), 0.0
    for answered, later in events:
        now += later
        if answered:
            circuit.succeeded()
            assert circuit.closed
        else:
            circuit.failed(now)
        assert circuit.state(now + SETTINGS.max_pause_s) != "open"
