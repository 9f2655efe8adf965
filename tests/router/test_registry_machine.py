"""Everything that may happen to the members of a router, in any order: who is in which pool, and who is found by its id."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from microserving.errors import ConfigError
from microserving.program import EngineRole
from microserving.protocol.microserving import EngineInfo
from microserving.router.circuit import CircuitSettings
from microserving.router.engine_client import EngineTimeouts
from microserving.router.engine_registry import EngineRegistry, Peer

from .engine_server import INFO
from .virtual_time import VirtualTimeLoop

URLS = [f"http://engine-{number}" for number in range(4)]
IDS = ["a", "b", "c"]
ROLES = st.sampled_from(["prefill", "decode", "hybrid"])
PICKS = st.integers(0, 100)
DRAIN_S = 10.0
pytestmark = pytest.mark.timeout(600)  # to make a failing example short takes long


@dataclass(eq=False)
class Leaving:
    """A drain, or a removal, that is under way. undrained: whether its engine is wanted again."""

    task: asyncio.Task[None]
    peer: Peer
    removes: bool
    undrained: bool = False


@dataclass(eq=False)
class Known:
    """What the test knows of a member."""

    role: EngineRole
    up: bool = False
    draining: bool = False
    id: str | None = None
    failures: int = 0


class Membership(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.registry = EngineRegistry(
            [], [], EngineTimeouts(), CircuitSettings(failures=2), drain_timeout_s=DRAIN_S
        )
        self.known: dict[Peer, Known] = {}
        self.leaving: list[Leaving] = []
        self.epochs = count()

    def step(self, seconds: float = 0.0) -> None:
        """Let tasks go on, and time pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))
        for _ in range(5):
            self.loop.run_until_complete(asyncio.sleep(0))
        self.settle_those_that_left()

    def settle_those_that_left(self) -> None:
        for leaving in [each for each in self.leaving if each.task.done()]:
            self.leaving.remove(leaving)
            error = leaving.task.exception()
            assert (error is not None) == leaving.undrained, error
            if error is None and leaving.removes:
                assert leaving.peer not in self.registry.peers
                self.known.pop(leaving.peer, None)

    def pick(self, number: int) -> Peer:
        return list(self.known)[number % len(self.known)]

    @rule(url=st.sampled_from(URLS), role=ROLES)
    def add(self, url: str, role: EngineRole) -> None:
        taken = url in [peer.client.url for peer in self.registry.peers]
        try:
            self.known[self.registry.add(url, role)] = Known(role)
        except ConfigError:
            assert taken
        else:
            assert not taken

    @precondition(lambda self: self.known)
    @rule(number=PICKS, engine_id=st.sampled_from(IDS), restarts=st.booleans())
    def answers_a_probe(self, number: int, engine_id: str, restarts: bool) -> None:
        peer = self.pick(number)
        known = self.known[peer]
        same = peer.client.info is not None and peer.client.info.engine_id == engine_id and not restarts
        epoch = peer.client.info.epoch if same and peer.client.info is not None else f"e{next(self.epochs)}"
        was_up, holders = known.up, [each for each, of in self.known.items() if of.up and of.id == engine_id]
        admitted = self.registry.admit(peer, EngineInfo(**INFO | {"engine_id": engine_id, "epoch": epoch}))
        assert admitted == (holders in ([], [peer]))
        known.up = admitted
        if admitted:
            for other in self.known.values():
                other.id = None if other.id == engine_id else other.id
            if not (was_up and same):
                known.failures = 0
            known.id = engine_id

    @precondition(lambda self: self.known)
    @rule(number=PICKS)
    def goes_down(self, number: int) -> None:
        peer = self.pick(number)
        self.registry.mark_down(peer, "does not answer")
        self.known[peer].up = False

    @precondition(lambda self: self.known)
    @rule(number=PICKS, role=ROLES)
    def set_role(self, number: int, role: EngineRole) -> None:
        peer = self.pick(number)
        self.loop.run_until_complete(self.registry.set_role(peer.client.url, role))
        self.known[peer].role = role

    @precondition(lambda self: self.known)
    @rule(number=PICKS, begins=st.booleans())
    def a_request_begins_or_ends(self, number: int, begins: bool) -> None:
        client, in_flight = self.pick(number).client, self.registry.in_flight
        if begins:
            in_flight[client] += 1
        elif in_flight[client] == 1:
            del in_flight[client]
        elif client in in_flight:
            in_flight[client] -= 1
        self.step()

    @precondition(lambda self: self.known)
    @rule(number=PICKS, answered=st.booleans())
    def a_verb_ends(self, number: int, answered: bool) -> None:
        peer = self.pick(number)
        self.loop.call_soon(self.registry._outcome, peer.client, answered)
        self.step()
        known = self.known[peer]
        known.failures = 0 if answered else known.failures + 1

    @precondition(lambda self: self.known)
    @rule(number=PICKS, removes=st.booleans())
    def leave(self, number: int, removes: bool) -> None:
        peer = self.pick(number)
        work = self.registry.remove if removes else self.registry.drain
        self.leaving.append(Leaving(self.loop.create_task(work(peer.client.url)), peer, removes))
        self.known[peer].draining = True
        self.step()

    @precondition(lambda self: self.known)
    @rule(number=PICKS)
    def undrain(self, number: int) -> None:
        peer = self.pick(number)
        self.registry.undrain(peer.client.url)
        self.known[peer].draining = False
        for leaving in self.leaving:
            leaving.undrained |= leaving.peer is peer

    @rule(seconds=st.sampled_from([0.5, 1.5, 2 * DRAIN_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.step(seconds)

    @invariant()
    def members_are_those_that_were_added(self) -> None:
        assert self.registry.peers == list(self.known)
        assert [peer.client.role for peer in self.registry.peers] == [of.role for of in self.known.values()]

    @invariant()
    def pools_hold_who_can_serve_in_their_order(self) -> None:
        def serves(peer: Peer, of: Known) -> bool:
            if not of.up or of.draining:
                return False
            if of.failures < 2:
                return True
            half_open = peer.circuit.state(self.loop.time()) == "half_open"
            return half_open and peer.client not in self.registry.in_flight

        async def pools() -> dict[str, list[object]]:
            cluster = self.registry.cluster
            return {name: list(getattr(cluster, name)) for name in ("prefill", "decode", "all")}

        found = self.loop.run_until_complete(pools())
        serving = [(peer.client, of.role) for peer, of in self.known.items() if serves(peer, of)]
        assert found["all"] == [client for client, _ in serving]
        assert found["prefill"] == [client for client, role in serving if role != "decode"]
        assert found["decode"] == [client for client, role in serving if role != "prefill"]

    @invariant()
    def an_id_leads_to_one_engine(self) -> None:
        ids = [of.id for of in self.known.values() if of.id is not None]
        assert len(set(ids)) == len(ids)
        for peer, of in self.known.items():
            if of.id is not None:
                assert self.registry.find(of.id) is peer

    def teardown(self) -> None:
        for client in list(self.registry.in_flight):
            del self.registry.in_flight[client]
        self.step(1.0)
        assert not self.leaving
        self.loop.run_until_complete(self.registry.close())
        self.loop.close()


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=60, stateful_step_count=40)
