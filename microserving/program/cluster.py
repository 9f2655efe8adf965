"""The engines that a program can choose from, and what is known of them together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from microserving.errors import ConfigError, MicroservingError, NoEngine
from microserving.policies import NEED_REQUEST, POLICIES, EngineLoad, PrefixIndex, Situation
from microserving.program.engine_client import EngineClient, EngineRole
from microserving.program.metrics import ClusterMetrics
from microserving.program.request import Request

EngineSource = Callable[[], Sequence[EngineClient]]
"""Tells the live engines of a pool at the moment, always in the same order."""

Bind = Callable[[EngineClient], EngineClient]
"""Wraps an engine before a program gets it: the host does so to know what a request holds."""

SetRole = Callable[[str, EngineRole], Awaitable[None]]
"""Moves the engine with this id to another role. Raises ConfigError when it cannot."""

_RETRY_AFTER_S = 1.0
_ASK_S = 0.5
"""How long ``prefix_aware_exact`` waits for an engine's answer; of a slower one the index is believed."""


class Assigned:
    """Prompt tokens that were sent each engine's way since it last told its load, so that a burst between two looks at
    the load is spread."""

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[EngineLoad, int]] = {}

    def add(self, engine: EngineClient, tokens: int) -> None:
        self._tokens[engine.id] = (engine.load, self.since(engine) + tokens)

    def since(self, engine: EngineClient) -> int:
        load, tokens = self._tokens.get(engine.id, (None, 0))
        return tokens if load is engine.load else 0


@dataclass(slots=True)
class PoolState:
    """What all views of a pool share. turns: how often each policy was asked."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    assigned: Assigned = field(default_factory=Assigned)
    turns: Counter[str] = field(default_factory=Counter)


class Pool:
    """The live engines of one role, in a stable order. Iterable; ``len`` is the number of live engines.

    Each policy is a method that chooses one engine; ``choose`` takes the policy's name. All of them raise NoEngine
    when no engine of the pool is up.
    """

    def __init__(self, name: str, engines: EngineSource, state: PoolState | None = None) -> None:
        self._name = name
        self._engines = engines
        self._state = PoolState() if state is None else state
        self._seen: Bind = _as_it_is
        self._chosen: Bind = _as_it_is
        self._without: Collection[EngineClient] = ()
        self._strictly = False

    def __iter__(self) -> Iterator[EngineClient]:
        return map(self._seen, self._live())

    def __len__(self) -> int:
        return len(self._live())

    def round_robin(self) -> EngineClient:
        """The next engine in turn."""
        return self.choose("round_robin")

    def least_loaded(self) -> EngineClient:
        """The engine with the fewest requests in flight."""
        return self.choose("least_loaded")

    def most_free_memory(self) -> EngineClient:
        """The engine with the largest free share of its KV pool."""
        return self.choose("most_free_memory")

    def power_of_two(self) -> EngineClient:
        """The less loaded of two engines drawn at random."""
        return self.choose("power_of_two")

    def prompt_length(self, request: Request) -> EngineClient:
        """For a long prompt the engine with most compute to spare, for a short one the one that finishes it soonest."""
        return self.choose("prompt_length", request)

    def prefix_aware(self, request: Request) -> EngineClient:
        """The engine that probably has most of the prompt in its cache, unless it is too busy. Asks nobody."""
        return self.choose("prefix_aware", request)

    async def prefix_aware_exact(self, request: Request) -> EngineClient:
        """Like ``prefix_aware``, but the engines are asked (all at once) what they have cached."""
        matched = await self.matched(request)
        return self.choose("prefix_aware", request, matched={engine.id: n for engine, n in matched.items()})

    async def matched(self, request: Request) -> dict[EngineClient, int]:
        """How many leading prompt tokens each engine of the pool has cached, by asking them all at once.

        One that fails or does not answer soon counts as what the index believes of it. Never empty: raises NoEngine.
        """
        engines = self._some()
        believed = self._state.index.look_up(request.cache_salt, request.prompt_token_ids).matched
        asked = (_ask(self._seen(engine), request, believed.get(engine.id, 0)) for engine in engines)
        answers = await asyncio.gather(*asked)
        return {self._seen(engine): n for engine, n in zip(engines, answers, strict=True)}

    def choose(
        self, policy: str, request: Request | None = None, *, matched: dict[str, int] | None = None
    ) -> EngineClient:
        """An engine by the named policy (see ``microserving.policies.POLICIES``).

        request: needed by those policies that look at it. matched: engine id -> tokens of it in the engine's cache,
        when that is known better than by the index.
        Raises: NoEngine, ValueError for an unknown name or a missing request.
        """
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}; there are: {', '.join(POLICIES)}")
        if policy in NEED_REQUEST and request is None:
            raise ValueError(f"the policy {policy!r} needs the request")
        engines = self._some()
        turn = self._state.turns[policy]
        self._state.turns[policy] += 1
        if request is None:
            return self._chosen(POLICIES[policy](engines, Situation(turn)))
        return self._chosen(self._choose_for(request, policy, engines, turn, matched))

    def bound(
        self,
        *,
        seen: Bind,
        chosen: Bind,
        without: Collection[EngineClient] = (),
        strictly: bool = False,
    ) -> Pool:
        """The same pool, sharing its state. Engines pass through ``seen`` when iterated, ``chosen`` by a policy; those
        in ``without``, which is looked at each time, are left out: while others are up, or always (``strictly``)."""
        pool = Pool.__new__(Pool)
        pool._name, pool._engines, pool._state = self._name, self._engines, self._state
        pool._seen, pool._chosen, pool._without, pool._strictly = seen, chosen, without, strictly
        return pool

    def _live(self) -> Sequence[EngineClient]:
        engines = self._engines()
        if not self._without:
            return engines
        others = [engine for engine in engines if engine not in self._without]
        return others if others or self._strictly else engines

    def _some(self) -> Sequence[EngineClient]:
        engines = self._live()
        if not engines:
            name = f"{self._name} engine" if self._name else "engine"
            raise NoEngine(f"no {name} is reachable", retry_after_s=_RETRY_AFTER_S)
        return engines

    def _choose_for(
        self,
        request: Request,
        policy: str,
        engines: Sequence[EngineClient],
        turn: int,
        matched: dict[str, int] | None,
    ) -> EngineClient:
        index, assigned = self._state.index, self._state.assigned
        by_prefix = policy == "prefix_aware"
        prefix = index.look_up(request.cache_salt, request.prompt_token_ids) if by_prefix else None
        if matched is None:
            matched = dict(prefix.matched) if prefix is not None else {}
        since = {engine.id: assigned.since(engine) for engine in engines}
        engine = POLICIES[policy](engines, Situation(turn, request.prompt_length, matched, since))
        if prefix is not None:
            index.routed(prefix, request.request_id, engine.id)
        assigned.add(engine, request.prompt_length - min(matched.get(engine.id, 0), request.prompt_length))
        return engine


class Cluster:
    """All engines, by role: ``cluster.prefill``, ``cluster.decode`` and ``cluster.all``.

    metrics: latencies of late, by pool. index: what is known of the engines' prefix caches; the router feeds both.
    """

    def __init__(
        self,
        *,
        prefill: EngineSource,
        decode: EngineSource,
        all: EngineSource,
        set_role: SetRole | None = None,
        metrics: ClusterMetrics | None = None,
    ) -> None:
        self.metrics = ClusterMetrics() if metrics is None else metrics
        self.index = PrefixIndex()
        assigned = Assigned()
        self.prefill = Pool("prefill", prefill, PoolState(self.index, assigned))
        self.decode = Pool("decode", decode, PoolState(self.index, assigned))
        self.all = Pool("", all, PoolState(self.index, assigned))
        self._set_role = set_role

    async def set_role(self, engine: EngineClient, role: EngineRole) -> None:
        """Move an engine to another pool (``hybrid``: to both). Requests that it is serving go on.

        Any engine can do any role: a role is only what programs are offered it for.
        Raises: ConfigError when this router cannot change roles, ValueError for an unknown role.
        """
        if role not in get_args(EngineRole):
            raise ValueError(f"unknown role {role!r}; there are: {', '.join(get_args(EngineRole))}")
        if self._set_role is None:
            raise ConfigError("the roles of this router's engines are fixed")
        await self._set_role(engine.id, role)

    def bound(
        self,
        *,
        seen: Bind,
        chosen: Bind,
        without: Collection[EngineClient] = (),
        strictly: bool = False,
    ) -> Cluster:
        """The same cluster, sharing all state; see ``Pool.bound``."""
        cluster = Cluster.__new__(Cluster)
        cluster.__dict__.update(
            self.__dict__
        )  # as copy.copy does, at a fifth of the price: this is done per request
        cluster.prefill = self.prefill.bound(seen=seen, chosen=chosen, without=without, strictly=strictly)
        cluster.decode = self.decode.bound(seen=seen, chosen=chosen, without=without, strictly=strictly)
        cluster.all = self.all.bound(seen=seen, chosen=chosen, without=without, strictly=strictly)
        return cluster


def _as_it_is(engine: EngineClient) -> EngineClient:
    return engine


async def _ask(engine: EngineClient, request: Request, otherwise: int) -> int:
    try:
        async with asyncio.timeout(_ASK_S):
            return await engine.match_prefix(request)
    except (MicroservingError, TimeoutError):
        return otherwise
