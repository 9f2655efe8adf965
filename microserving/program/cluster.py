"""The engines that a program can choose from, and what is known of them together."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from microserving.errors import ConfigError, MicroservingError, NoEngine
from microserving.policies import (
    NEED_REQUEST,
    NOMINAL_OUTPUT_TOKENS,
    POLICIES,
    PrefixIndex,
    Situation,
    balanced_end,
    is_mostly_cached,
)
from microserving.program.backlog import Backlog
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


@dataclass(slots=True)
class PoolState:
    """What all views of a pool share. turns: how often each policy was asked."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    backlog: Backlog = field(default_factory=Backlog)
    turns: Counter[str] = field(default_factory=Counter)


class Pool:
    """The live engines of one role, in a stable order. Iterable; ``len`` is the number of live engines.

    Each policy is a method that chooses one engine; ``choose`` takes the policy's name. All of them raise NoEngine
    when no engine of the pool is up.
    """

    __slots__ = ("_chosen", "_engines", "_name", "_seen", "_state", "_strictly", "_without")

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
        choice = POLICIES.get(policy)
        if choice is None:
            raise ValueError(f"unknown policy {policy!r}; there are: {', '.join(POLICIES)}")
        if policy in NEED_REQUEST and request is None:
            raise ValueError(f"the policy {policy!r} needs the request")
        engines = self._some()
        turns = self._state.turns
        turn = turns[policy]
        turns[policy] = turn + 1
        if request is None:
            return self._chosen(choice(engines, Situation(turn)))
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
        return self._bound((seen, chosen, without, strictly))

    def _bound(self, binding: tuple[Bind, Bind, Collection[EngineClient], bool]) -> Pool:
        pool = Pool.__new__(Pool)
        pool._name, pool._engines, pool._state = self._name, self._engines, self._state
        pool._seen, pool._chosen, pool._without, pool._strictly = binding
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
        index, backlog = self._state.index, self._state.backlog
        by_prefix = policy == "prefix_aware"
        prefix = index.look_up(request.cache_salt, request.prompt_token_ids) if by_prefix else None
        if matched is None:
            matched = dict(prefix.matched) if prefix is not None else {}
        assigned = {each.id: backlog.tokens(each) - each.load.queued_prefill_tokens for each in engines}
        engine = POLICIES[policy](engines, Situation(turn, request.prompt_length, matched, assigned))
        if prefix is not None:
            index.routed(prefix, request.request_id, engine.id)
        backlog.add(engine, request.prompt_length - min(matched.get(engine.id, 0), request.prompt_length))
        return engine


class Cluster:
    """All engines, by role: ``cluster.prefill``, ``cluster.decode`` and ``cluster.all``.

    metrics: latencies of late, by pool. index: what is known of the engines' prefix caches; the router feeds both.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        prefill: EngineSource,
        decode: EngineSource,
        all: EngineSource,
        set_role: SetRole | None = None,
        metrics: ClusterMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = ClusterMetrics() if metrics is None else metrics
        self.index = PrefixIndex()
        self._backlog = Backlog(clock)
        self.prefill = Pool("prefill", prefill, PoolState(self.index, self._backlog))
        self.decode = Pool("decode", decode, PoolState(self.index, self._backlog))
        self.all = Pool("", all, PoolState(self.index, self._backlog))
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

    def balanced_end(
        self, request: Request, matched: int, prefill: EngineClient, decode: EngineClient
    ) -> int:
        """Where to split the prompt so that requests take the least time, as far as is known now:
        ``microserving.policies.balanced_end``. Call it once a request: the request counts as one that came for the two,
        and what each of them gets as sent there.

        matched: leading prompt tokens that ``decode`` has cached; what ``prefill`` has is not known.
        """
        backlog, length = self._backlog, request.prompt_length
        matched = min(matched, length)
        shared = 0 if is_mostly_cached(length, matched) else length - matched
        wanted = request.stop.max_tokens
        backlog.arrived(prefill, decode, shared, NOMINAL_OUTPUT_TOKENS if wanted is None else wanted)
        end = balanced_end(length, matched, prefill.load, decode.load, *backlog.demand(prefill, decode))
        backlog.add(prefill, max(0, end - matched))
        backlog.add(decode, length - max(end, matched))
        return end

    def forget(self, engine_id: str) -> None:
        """The engine is gone, or was restarted: nothing is known of it any more. No program must call it: the host does."""
        self.index.forget(engine_id)
        self._backlog.forget(engine_id)

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
        binding = seen, chosen, without, strictly
        cluster.prefill = self.prefill._bound(binding)
        cluster.decode = self.decode._bound(binding)
        cluster.all = self.all._bound(binding)
        return cluster


def _as_it_is(engine: EngineClient) -> EngineClient:
    return engine


async def _ask(engine: EngineClient, request: Request, otherwise: int) -> int:
    try:
        async with asyncio.timeout(_ASK_S):
            return await engine.match_prefix(request)
    except (MicroservingError, TimeoutError):
        return otherwise
