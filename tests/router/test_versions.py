"""Versions of the program: the switch, what drains, what is kept, and when a new one is taken back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from microserving.errors import InternalError, ProgramError
from microserving.program import Cluster, GenerationChunk, Program, Request
from microserving.program.testing import FakeCluster, collect
from microserving.router.dispatch import DispatchSettings
from microserving.router.program_host import HostSettings, ProgramHost
from microserving.router.program_loader import LoadedProgram, load_source, source_of
from microserving.router.retries import RetrySettings

from .hosting import Hosted, generation

LAST = GenerationChunk(text="!", finish_reason="stop")


class Says(Program):
    """Answers with its own name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    async def route(self, request: Request, cluster: Cluster) -> AsyncIterator[GenerationChunk]:
        yield GenerationChunk(text=self._name)
        yield LAST


def loaded(name: str) -> LoadedProgram:
    return LoadedProgram(name=name, path=Path(__file__), line=1, instance=Says(name))


def host_of(name: str = "one", **settings: Any) -> ProgramHost:
    return ProgramHost(loaded(name), FakeCluster(), HostSettings(**settings))


def states(host: ProgramHost) -> list[tuple[int, str, str]]:
    return [(version.number, version.program.name, state) for version, state in host.versions]


def in_loop(scenario: Any) -> None:
    async def run() -> None:
        await scenario()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_requests_finish_on_the_version_that_they_began_on() -> None:
    async def scenario() -> None:
        hosted = Hosted(Says("one"))
        running = hosted.dispatcher.generate(generation())
        assert (await anext(running)).text == "one"
        hosted.host.switch(loaded("two"))
        assert [
            chunk.text for chunk in await collect(hosted.dispatcher.generate(generation(request_id="s")))
        ] == [
            "two",
            "!",
        ]
        assert states(hosted.host) == [(2, "two", "in_charge"), (1, "test", "draining")]
        assert [chunk.text for chunk in await collect(running)] == ["!"]
        assert states(hosted.host) == [(2, "two", "in_charge"), (1, "test", "kept")]
        await hosted.settle()

    in_loop(scenario)


def test_only_the_last_few_are_kept_and_those_that_are_used() -> None:
    async def scenario() -> None:
        host = host_of("v1", kept=2)
        used = host.acquire()
        for number in range(2, 7):
            host.switch(loaded(f"v{number}"))
        assert states(host) == [
            (6, "v6", "in_charge"),
            (5, "v5", "kept"),
            (4, "v4", "kept"),
            (1, "v1", "draining"),
        ]
        host.release(used, "ok")
        assert [number for number, _, _ in states(host)] == [6, 5, 4]
        assert host.deployments == 5
        await host.stop()

    in_loop(scenario)


def test_a_version_that_is_gone_leaves_nothing() -> None:
    text = b"from microserving.program import Program\nclass P(Program):\n    async def route(self, request, cluster):\n        yield\n"

    async def scenario() -> None:
        modules = set(sys.modules)
        host = host_of(kept=1)
        gone = []
        for _ in range(5):
            program = load_source(source_of(Path("/p.py"), text))
            gone.append(weakref.ref(type(program.instance)))
            host.switch(program)
            del program
        gc.collect()
        assert [reference() is None for reference in gone] == [True, True, True, False, False]
        assert len(set(sys.modules) - modules) == 2
        await host.stop()

    in_loop(scenario)


def test_going_back_step_by_step() -> None:
    async def scenario() -> None:
        host = host_of("one")
        host.switch(loaded("two"))
        host.switch(loaded("three"))
        assert host.roll_back().program.name == "two"
        assert states(host) == [(2, "two", "in_charge"), (1, "one", "kept")]
        assert host.roll_back().number == 1
        with pytest.raises(ProgramError, match="there is no earlier program to go back to"):
            host.roll_back()
        assert host.switch(loaded("four")).number == 4
        assert host.rollbacks == 2
        rollback = host.last_rollback
        assert rollback is not None
        assert (rollback.version, rollback.back_to, rollback.automatic) == (2, 1, False)
        await host.stop()

    in_loop(scenario)


def use(host: ProgramHost, *outcomes: Any) -> None:
    for outcome in outcomes:
        host.release(host.acquire(), outcome)


@pytest.mark.parametrize(
    ("outcomes", "back"),
    [
        (["program_failed"] * 2, False),
        (["program_failed"] * 3, True),
        (["ok", "ok", "ok", *["program_failed"] * 2], False),
        (["ok", "ok", "ok", *["program_failed"] * 3], True),
        (["ok"] * 17 + ["program_failed"] * 3, False),
        (["ok"] * 20 + ["program_failed"] * 30, False),
        (["other"] * 50 + ["program_failed"] * 3, True),
        (["other"] * 50, False),
    ],
)
def test_a_new_program_that_fails_is_taken_back(
    outcomes: list[str], back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At least 3 failures among its first 20 attempts, and at least half of those that ended."""

    async def scenario() -> None:
        host = host_of("good")
        use(host, *["ok"] * 5)
        host.switch(loaded("new"))
        use(host, *outcomes)
        assert host.program.name == ("good" if back else "new")
        assert (host.rollbacks, host.last_rollback is not None) == (int(back), back)
        await host.stop()

    in_loop(scenario)
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage().partition(":")[0] for record in told] == [
        "version 2 (new) was rolled back to version 1 (good)"
    ] * back


def test_the_first_program_is_never_taken_back() -> None:
    async def scenario() -> None:
        host = host_of()
        use(host, *["program_failed"] * 50)
        assert (host.program.name, host.rollbacks) == ("one", 0)

    in_loop(scenario)


def test_late_failures_of_a_version_that_was_replaced_do_nothing() -> None:
    async def scenario() -> None:
        host = host_of()
        host.switch(loaded("broken"))
        uses = [host.acquire() for _ in range(9)]
        for program in uses[:3]:
            host.release(program, "program_failed")
        assert (host.current.number, host.rollbacks) == (1, 1)
        for program in uses[3:]:
            host.release(program, "program_failed")
        assert (host.current.number, host.rollbacks) == (1, 1)
        assert states(host) == [(1, "one", "in_charge")]
        await host.stop()

    in_loop(scenario)


def test_a_request_that_a_new_program_failed_gets_the_one_before() -> None:
    async def scenario() -> None:
        host = host_of("one")
        first = host.program
        assert not host.has_other_than(first)
        assert host.acquire(failed=first) is first
        second = host.switch(loaded("two")).program
        third = host.switch(loaded("three")).program
        assert host.has_other_than(third)
        assert host.acquire(failed=third) is second
        assert host.acquire(failed=second) is first
        assert host.acquire(failed=first) is third
        use(host, *["ok"] * 20)  # it is trusted now: whoever it fails fails
        assert not host.has_other_than(third)
        for program in (first, second, first, third):
            host.release(program, "other")
        assert host.uses == 0
        await host.stop()

    in_loop(scenario)


class Broken(Program):
    async def route(self, request: Request, cluster: Cluster) -> AsyncIterator[GenerationChunk]:
        raise ZeroDivisionError
        yield LAST


def test_no_client_sees_a_new_program_that_is_broken() -> None:
    async def scenario() -> None:
        hosted = Hosted(Says("one"))
        hosted.host.switch(LoadedProgram("broken", Path(__file__), 1, Broken()))
        for number in range(10):
            chunks = await collect(hosted.dispatcher.generate(generation(request_id=f"r{number}")))
            assert [chunk.text for chunk in chunks] == ["one", "!"]
        assert (hosted.host.current.number, hosted.host.rollbacks) == (1, 1)
        await hosted.settle()

    in_loop(scenario)


def test_many_requests_at_once_on_a_program_that_is_broken() -> None:
    """They are more than the budget of retries has: it is there for sick engines."""

    async def scenario() -> None:
        retries = RetrySettings(budget_share=0.0, budget_burst=0, backoff_s=0.0)
        hosted = Hosted(Says("one"), dispatching=DispatchSettings(retries=retries))
        hosted.host.switch(LoadedProgram("broken", Path(__file__), 1, Broken()))
        requests = [generation(request_id=f"r{number}") for number in range(300)]
        answers = await asyncio.gather(*(collect(hosted.dispatcher.generate(one)) for one in requests))
        assert {tuple(chunk.text for chunk in chunks) for chunks in answers} == {("one", "!")}
        assert hosted.host.rollbacks == 1
        await hosted.settle()

    in_loop(scenario)


def test_without_a_window_nothing_is_taken_back() -> None:
    async def scenario() -> None:
        hosted = Hosted(Says("one"))
        hosted.host = ProgramHost(loaded("one"), hosted.cluster, HostSettings(rollback_window=0))
        hosted.host.switch(LoadedProgram("broken", Path(__file__), 1, Broken()))
        use(hosted.host, *["program_failed"] * 50)
        assert hosted.host.current.number == 2
        await hosted.host.stop()
        with pytest.raises(InternalError):
            await collect(Hosted(Broken()).dispatcher.generate(generation()))

    in_loop(scenario)


def test_a_slow_drain_is_only_told(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        host = host_of(drain_timeout_s=0.01)
        used = host.acquire()
        host.switch(loaded("two"))
        async with asyncio.timeout(5):
            while not caplog.messages:  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0.005)
        assert states(host)[1] == (1, "one", "draining")
        host.release(used, "ok")
        await host.stop()

    caplog.set_level(logging.WARNING)
    in_loop(scenario)
    assert caplog.messages == ["version 1 (one) was replaced 0.01 s ago and still serves 1 attempts"]


class Plans(Program):
    """Notes when its plan begins and ends; raises as often as it is told."""

    def __init__(self, notes: list[str], name: str, failures: int = 0) -> None:
        super().__init__()
        self._notes, self._name, self._failures = notes, name, failures

    async def route(self, request: Request, cluster: Cluster) -> AsyncIterator[GenerationChunk]:
        yield LAST

    async def plan(self, cluster: Cluster) -> None:
        self._notes.append(f"{self._name} begins")
        if self._failures:
            self._failures -= 1
            raise SystemExit("a bug")
        try:
            await asyncio.Event().wait()
        finally:
            self._notes.append(f"{self._name} ends")


def test_the_plan_of_the_one_in_charge_runs() -> None:
    notes: list[str] = []

    def planning(name: str) -> LoadedProgram:
        return LoadedProgram(name, Path(__file__), 1, Plans(notes, name))

    async def scenario() -> None:
        host = ProgramHost(planning("a"), FakeCluster())
        host.start()
        await asyncio.sleep(0)
        host.switch(planning("b"))
        await asyncio.sleep(0)
        host.roll_back()
        await asyncio.sleep(0)
        assert sorted(notes[:3]) == ["a begins", "a ends", "b begins"]
        assert sorted(notes[3:]) == ["a begins", "b ends"]
        await host.stop()
        await host.stop()

    in_loop(scenario)
    assert notes[-1] == "a ends"


def test_a_plan_that_raises_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("microserving.router.plan.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("microserving.router.plan.LONGEST_PAUSE_S", 0.002)
    notes: list[str] = []

    async def scenario() -> None:
        program = LoadedProgram("p", Path(__file__), 1, Plans(notes, "p", failures=3))
        host = ProgramHost(program, FakeCluster())
        host.start()
        async with asyncio.timeout(5):
            while len(notes) < 4:  # noqa: ASYNC110 - the plan tells nobody
                await asyncio.sleep(0.001)
        await host.stop()

    in_loop(scenario)
    assert notes == ["p begins"] * 4 + ["p ends"]
    pauses = [message.rpartition("again in ")[2] for message in caplog.messages]
    assert pauses == ["0.001 s", "0.002 s", "0.002 s"]


def test_a_plan_that_clings_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("microserving.router.program_host._STOP_S", 0.01)
    release = asyncio.Event()

    class Clings(Says):
        async def plan(self, cluster: Cluster) -> None:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()

    async def scenario() -> None:
        host = ProgramHost(LoadedProgram("c", Path(__file__), 1, Clings("c")), FakeCluster())
        host.start()
        await asyncio.sleep(0)
        await host.stop()
        release.set()
        for _ in range(3):
            await asyncio.sleep(0)

    in_loop(scenario)
    assert caplog.messages == ["the plan of a router program does not end although it was cancelled"]
