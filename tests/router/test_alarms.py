"""An alarm goes off once, at its time, unless it is taken back; one timer of the loop serves them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.router.alarms import Alarms
from microserving.testing.virtual_time import run_virtual


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=20))
@settings(max_examples=50)
def test_each_goes_off_at_its_time_unless_it_was_taken_back(wanted: list[tuple[int, bool]]) -> None:
    async def scenario() -> None:
        alarms, rung = Alarms(), dict[int, float]()
        now = asyncio.get_running_loop().time

        def ring(number: int) -> Callable[[], None]:
            return lambda: rung.update({number: now()})

        for number, (when, _) in enumerate(wanted):
            alarms.set(number, when / 10, ring(number))
        for number, (_, taken_back) in enumerate(wanted):
            if taken_back:
                alarms.unset(number)
                alarms.unset(number)
        await asyncio.sleep(6.0)
        assert len(alarms) == 0
        assert set(rung) == {number for number, (_, taken_back) in enumerate(wanted) if not taken_back}
        for number, at in rung.items():
            assert wanted[number][0] / 10 <= at <= wanted[number][0] / 10 + 0.01

    run_virtual(scenario())


def test_an_alarm_may_set_itself_and_take_others_back() -> None:
    async def scenario() -> None:
        alarms, rung = Alarms(), list[str]()

        def first() -> None:
            rung.append("first")
            alarms.unset("second")
            if len(rung) < 3:
                alarms.set("first", 2.0 * len(rung), first)

        alarms.set("first", 1.0, first)
        alarms.set("second", 1.0, lambda: rung.append("second"))
        await asyncio.sleep(10.0)
        assert rung == ["first"] * 3

    run_virtual(scenario())


def test_the_last_one_set_for_a_key_counts() -> None:
    async def scenario() -> None:
        alarms, rung = Alarms(), list[float]()
        loop = asyncio.get_running_loop()
        alarms.set("key", 1.0, lambda: rung.append(-1.0))
        alarms.set("key", 3.0, lambda: rung.append(loop.time()))
        await asyncio.sleep(10.0)
        assert rung == [3.0]

    run_virtual(scenario())
