"""Deployments, rollbacks and requests in any order: who is in charge, who is kept, and what is forgotten, once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from microserving.errors import ProgramError
from microserving.program import Chunks, Cluster, Program, Request
from microserving.program.testing import FakeCluster
from microserving.router.program_host import HostSettings, Outcome, ProgramHost
from microserving.router.program_loader import LoadedProgram

from .virtual_time import VirtualTimeLoop

WINDOW, FAILURES = 4, 2
pytestmark = pytest.mark.timeout(600)  # to make a failing example short takes long


class Nothing(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        return
        yield


class Counted(LoadedProgram):
    """unloaded: how often each was forgotten."""

    __slots__ = ()
    unloaded: ClassVar[Counter[str]] = Counter()

    def unload(self) -> None:
        self.unloaded[self.name] += 1


class Versions(RuleBasedStateMachine):
    @initialize(kept=st.integers(0, 3))
    def start(self, kept: int) -> None:
        self.loop = VirtualTimeLoop()
        self.kept = kept
        self.made = 0
        self.lent: list[LoadedProgram] = []
        self.ended: Counter[LoadedProgram] = Counter()
        self.failed: Counter[LoadedProgram] = Counter()
        Counted.unloaded.clear()
        self.chain = [self.make()]  # oldest first; the last one is in charge
        limits = HostSettings(
            kept=kept, rollback_window=WINDOW, rollback_threshold=0.5, rollback_min_failures=FAILURES
        )
        self.host = ProgramHost(self.chain[0], FakeCluster(), limits)

    def make(self) -> LoadedProgram:
        self.made += 1
        return Counted(f"p{self.made}", Path(__file__), 1, Nothing())

    def on_trial(self, program: LoadedProgram) -> bool:
        return program.name != "p1" and self.ended[program] < WINDOW

    @rule()
    def deploy(self) -> None:
        program = self.make()
        self.in_loop(lambda: self.host.switch(program))
        self.chain = [*self.chain, program][-self.kept - 1 :]

    @rule()
    def roll_back(self) -> None:
        if len(self.chain) == 1:
            with pytest.raises(ProgramError, match="no earlier program"):
                self.in_loop(self.host.roll_back)
        else:
            self.in_loop(self.host.roll_back)
            self.chain.pop()

    @rule()
    def begin(self) -> None:
        program = self.host.acquire()
        assert program is self.chain[-1]
        self.lent.append(program)

    @precondition(lambda self: self.lent)
    @rule(number=st.integers(0, 100))
    def begin_again(self, number: int) -> None:
        """A request that a program has just failed."""
        failed = self.lent[number % len(self.lent)]
        trusted = failed in self.chain[1:] and self.on_trial(failed)
        expected = self.chain[self.chain.index(failed) - 1] if trusted else self.chain[-1]
        assert self.host.has_other_than(failed) == (expected is not failed)
        program = self.host.acquire(failed=failed)
        assert program is expected
        self.lent.append(program)

    @precondition(lambda self: self.lent)
    @rule(
        number=st.integers(0, 100),
        outcome=st.sampled_from(["ok", "program_failed", "program_failed", "other"]),
    )
    def end(self, number: int, outcome: Outcome) -> None:
        program = self.lent.pop(number % len(self.lent))
        tried = self.on_trial(program)
        self.ended[program] += outcome != "other"
        self.failed[program] += outcome == "program_failed"
        self.in_loop(lambda: self.host.release(program, outcome))
        broken = self.failed[program] >= FAILURES and self.failed[program] >= 0.5 * self.ended[program]
        in_charge = program is self.chain[-1] and len(self.chain) > 1
        if outcome == "program_failed" and tried and in_charge and broken:
            self.chain.pop()

    def in_loop(self, work: object) -> None:
        async def run() -> None:
            assert callable(work)
            work()

        self.loop.run_until_complete(run())

    @invariant()
    def the_chain_is_kept(self) -> None:
        assert [version.program for version in self.host.kept] == self.chain
        assert self.host.program is self.chain[-1]

    @invariant()
    def what_is_used_or_kept_is_there_and_all_else_is_forgotten_once(self) -> None:
        there = {version.program for version, _ in self.host.versions}
        assert there == {*self.chain, *self.lent}
        assert self.host.uses == len(self.lent)
        gone = {f"p{number}" for number in range(1, self.made + 1)} - {program.name for program in there}
        assert Counted.unloaded == dict.fromkeys(gone, 1)

    def teardown(self) -> None:
        if hasattr(self, "host"):
            self.loop.run_until_complete(self.host.stop())
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()


TestVersions = Versions.TestCase
TestVersions.settings = settings(max_examples=60, stateful_step_count=40)
