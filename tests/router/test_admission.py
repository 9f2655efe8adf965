"""Load levels, the fair queue, and who is refused: in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.errors import ContextLengthExceeded, Overloaded, ShuttingDown
from microserving.policies import EngineLoad
from microserving.program import Chunks, Cluster, GenerationChunk, Program, Request
from microserving.router.admission import (
    MAX_PROMPT_TOKENS,
    Admission,
    AdmissionSettings,
    FairQueue,
)
from microserving.router.dispatch import Dispatcher

from .hosting import Hosted, generation
from .virtual_time import run_virtual


def scenario(run: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await run()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())


def test_levels_follow_what_is_admitted_and_what_waits_in_engines() -> None:
    async def run() -> None:
        loads = [EngineLoad()]
        admission = Admission(AdmissionSettings(max_in_flight=10, max_engine_waiting=4), lambda: loads)
        seen = []
        for _ in range(10):
            seen.append(admission.level)
            assert admission.try_enter()
        assert seen == ["low"] * 5 + ["moderate"] * 3 + ["high"] * 2
        assert admission.level == "critical"
        assert not admission.try_enter()
        for _ in range(10):
            admission.leave()
        loads[:] = [EngineLoad(waiting=4), EngineLoad(waiting=3)]
        await asyncio.sleep(0.1)
        assert (admission.level, admission.load) == ("moderate", 0.75)  # one engine has room
        loads[:] = [EngineLoad(waiting=4)] * 2
        await asyncio.sleep(0.1)
        assert admission.level == "critical"
        loads.clear()  # no engine: not for the queue to tell
        await asyncio.sleep(0.1)
        assert admission.level == "low"

    scenario(run)


def test_at_critical_load_a_request_is_refused_or_waits() -> None:
    async def run() -> None:
        refusing = Admission(AdmissionSettings(max_in_flight=1, action="reject"), list)
        await refusing.enter("a")
        with pytest.raises(Overloaded) as refused:
            await refusing.enter("a")
        assert refused.value.retry_after_s == 1.0
        queueing = Admission(AdmissionSettings(max_in_flight=1, queue_timeout_s=3.0), list)
        await queueing.enter("a")
        second = asyncio.create_task(queueing.enter("a"))
        await asyncio.sleep(1.0)
        assert (second.done(), queueing.waiting, queueing.queued) == (False, 1, 1)
        queueing.leave()
        await second
        began = asyncio.get_running_loop().time()
        with pytest.raises(Overloaded):
            await queueing.enter("b")
        assert asyncio.get_running_loop().time() - began == pytest.approx(3.0)
        queueing.leave()
        assert (queueing.admitted, queueing.waiting, queueing.refused) == (0, 0, 1)

    scenario(run)


def test_clients_take_turns_whatever_one_of_them_piles_up() -> None:
    async def run() -> None:
        admission = Admission(AdmissionSettings(max_in_flight=1), list)
        await admission.enter("first")
        order: list[str] = []

        async def ask(client: str, number: int) -> None:
            await admission.enter(client)
            order.append(f"{client}{number}")
            admission.leave()

        tasks = [asyncio.create_task(ask("greedy", number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks += [
            asyncio.create_task(ask("b", 0)),
            asyncio.create_task(ask("c", 0)),
            asyncio.create_task(ask("b", 1)),
        ]
        await asyncio.sleep(0)
        admission.leave()
        await asyncio.gather(*tasks)
        assert order == ["greedy0", "b0", "c0", "greedy1", "b1", "greedy2", "greedy3"]

    scenario(run)


def test_a_full_queue_makes_room_for_who_has_less_in_it() -> None:
    async def run() -> None:
        admission = Admission(AdmissionSettings(max_in_flight=1, queue_size=3), list)
        await admission.enter("x")
        greedy = [asyncio.create_task(admission.enter("greedy")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await admission.enter("greedy")
        modest = asyncio.create_task(admission.enter("modest"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await greedy[2]
        assert not modest.done()
        admission.close()
        for task in [*greedy[:2], modest]:
            with pytest.raises(ShuttingDown):
                await task

    scenario(run)


def test_requests_that_wait_because_engines_are_full_go_on_when_these_say_so() -> None:
    async def run() -> None:
        loads = [EngineLoad(waiting=64)]
        admission = Admission(AdmissionSettings(), lambda: loads)
        waiting = asyncio.create_task(admission.enter("a"))
        await asyncio.sleep(5.0)
        assert not waiting.done()
        loads[:] = [EngineLoad(waiting=10)]
        await asyncio.sleep(0.2)
        assert waiting.done()

    scenario(run)


@pytest.mark.parametrize("when", range(4))
def test_who_leaves_the_queue_leaves_nothing(when: int) -> None:
    async def run() -> None:
        admission = Admission(AdmissionSettings(max_in_flight=1), list)
        await admission.enter("a")
        tasks = [asyncio.create_task(admission.enter("b")) for _ in range(3)]
        for _ in range(when):
            await asyncio.sleep(0)
        admission.leave()  # lets the first one in, just when it is cancelled
        tasks[0].cancel()
        for task in tasks[1:]:
            await task
            admission.leave()
        await asyncio.wait(tasks)
        assert (admission.admitted, admission.waiting) == (0, 0)
        assert await admission.until_idle(1.0)

    scenario(run)


def test_waiting_until_all_have_ended_is_bounded() -> None:
    async def run() -> None:
        admission = Admission(AdmissionSettings(), list)
        await admission.enter("a")
        assert not await admission.until_idle(2.0)
        asyncio.get_running_loop().call_later(1.0, admission.leave)
        assert await admission.until_idle(2.0)

    scenario(run)


class Slow(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        yield GenerationChunk("a", (1,))
        await asyncio.sleep(1.0)
        yield GenerationChunk("b", (2,), finish_reason="stop")


def hosted(admission: Admission) -> Hosted:
    return Hosted(Slow(), admission=admission)


def test_a_slot_is_given_back_however_a_generation_ends() -> None:
    async def run() -> None:
        admission = Admission(AdmissionSettings(), list)
        dispatcher = hosted(admission).dispatcher
        assert [chunk.text async for chunk in dispatcher.generate(generation())] == ["a", "b"]
        left: Any = dispatcher.generate(generation())
        await anext(left)
        assert (admission.admitted, dispatcher.running) == (1, 1)
        await left.aclose()
        assert (admission.admitted, dispatcher.running) == (0, 0)
        reading = asyncio.create_task(_read(dispatcher))
        await asyncio.sleep(0.5)
        reading.cancel()
        await asyncio.wait([reading])
        assert (admission.admitted, dispatcher.running) == (0, 0)
        await dispatcher.stop()

    scenario(run)


async def _read(dispatcher: Dispatcher) -> None:
    async for _ in dispatcher.generate(generation()):
        pass


def test_a_prompt_over_the_cap_is_refused() -> None:
    async def run() -> None:
        dispatcher = hosted(Admission(AdmissionSettings(), list)).dispatcher
        with pytest.raises(ContextLengthExceeded) as refused:
            await anext(dispatcher.generate(generation(MAX_PROMPT_TOKENS + 1)))
        assert refused.value.param == "prompt"

    scenario(run)


def test_a_closed_door_is_not_ready() -> None:
    async def run() -> None:
        admission = Admission(AdmissionSettings(), list)
        dispatcher = hosted(admission).dispatcher
        assert dispatcher.ready
        admission.close()
        assert not dispatcher.ready
        with pytest.raises(ShuttingDown):
            await anext(dispatcher.generate(generation()))

    scenario(run)


def test_a_router_that_stops_keeps_no_slot() -> None:
    async def run() -> None:
        admission = Admission(AdmissionSettings(), list)
        dispatcher = hosted(admission).dispatcher
        dispatcher.refuse_requests()
        with pytest.raises(ShuttingDown):
            await anext(dispatcher.generate(generation()))
        assert admission.admitted == 0

    scenario(run)


@settings(max_examples=60)
@given(st.lists(st.one_of(st.sampled_from("abcd"), st.just(None), st.integers(0, 20)), max_size=60))
def test_a_fair_queue_loses_and_doubles_nobody(steps: list[str | int | None]) -> None:
    """A letter pushes for that client, None pops, a number removes that waiter."""
    loop = asyncio.new_event_loop()
    try:
        queue, size = FairQueue(8), 8
        inside: list[tuple[str, asyncio.Future[None]]] = []
        for step in steps:
            if isinstance(step, str):
                waiter: asyncio.Future[None] = loop.create_future()
                if queue.push(step, waiter):
                    inside = [(client, other) for client, other in inside if not other.done()]
                    inside.append((step, waiter))
                else:
                    assert len(inside) == size
            elif step is None:
                popped = queue.pop()
                assert (popped is None) == (not inside)
                if popped is not None:
                    owner = next(client for client, waiter in inside if waiter is popped)
                    first = next(waiter for client, waiter in inside if client == owner)
                    assert popped is first  # a client's own come in order
                    inside = [pair for pair in inside if pair[1] is not popped]
            elif step < len(inside):
                queue.remove(*inside.pop(step))
            assert len(queue) == len(inside) <= size
    finally:
        for _, waiter in inside:
            waiter.cancel()
        loop.close()
