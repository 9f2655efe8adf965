"""The engines that a program can choose from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from microserving.errors import NoEngine
from microserving.policies import POLICIES
from microserving.program.engine_client import EngineClient

EngineSource = Callable[[], Sequence[EngineClient]]
"""Tells the live engines of a pool at the moment, always in the same order."""

Bind = Callable[[EngineClient], EngineClient]
"""Wraps an engine before a program gets it: the host does so to know what a request holds."""

_RETRY_AFTER_S = 1.0


class Pool:
    """The live engines of one role, in a stable order. Iterable; ``len`` is the number of live engines.

    Each policy is a method that chooses one engine; ``choose`` takes the policy's name. All of them raise NoEngine
    when no engine of the pool is up.
    """

    def __init__(self, name: str, engines: EngineSource) -> None:
        self._name = name
        self._engines = engines
        self._seen: Bind = _as_it_is
        self._chosen: Bind = _as_it_is
        self._turns: Counter[str] = Counter()

    def __iter__(self) -> Iterator[EngineClient]:
        return map(self._seen, self._engines())

    def __len__(self) -> int:
        return len(self._engines())

    def round_robin(self) -> EngineClient:
        """The next engine in turn."""
        return self.choose("round_robin")

    def least_loaded(self) -> EngineClient:
        """The engine with the fewest requests in flight."""
        return self.choose("least_loaded")

    def most_free_memory(self) -> EngineClient:
        """The engine with the largest free share of its KV pool."""
        return self.choose("most_free_memory")

    def choose(self, policy: str) -> EngineClient:
        """An engine by the named policy (see ``microserving.policies.POLICIES``).

        Raises: NoEngine, ValueError for an unknown name.
        """
        if policy not in POLICIES:
            raise ValueError(f"unknown policy {policy!r}; there are: {', '.join(POLICIES)}")
        engines = self._engines()
        if not engines:
            raise NoEngine(
                f"no {self._name} engine is reachable".replace("  ", " "), retry_after_s=_RETRY_AFTER_S
            )
        turn = self._turns[policy]
        self._turns[policy] += 1
        return self._chosen(POLICIES[policy](engines, turn))

    def bound(self, *, seen: Bind, chosen: Bind) -> Pool:
        """The same pool, sharing the turns. Engines pass through ``seen`` when iterated, ``chosen`` by a policy."""
        pool = Pool(self._name, self._engines)
        pool._seen, pool._chosen = seen, chosen
        pool._turns = self._turns
        return pool


class Cluster:
    """All engines, by role: ``cluster.prefill``, ``cluster.decode`` and ``cluster.all``."""

    def __init__(self, *, prefill: EngineSource, decode: EngineSource, all: EngineSource) -> None:
        self.prefill = Pool("prefill", prefill)
        self.decode = Pool("decode", decode)
        self.all = Pool("", all)

    def bound(self, *, seen: Bind, chosen: Bind) -> Cluster:
        """The same cluster, sharing the pools' state; see ``Pool.bound``."""
        cluster = Cluster.__new__(Cluster)
        cluster.prefill = self.prefill.bound(seen=seen, chosen=chosen)
        cluster.decode = self.decode.bound(seen=seen, chosen=chosen)
        cluster.all = self.all.bound(seen=seen, chosen=chosen)
        return cluster


def _as_it_is(engine: EngineClient) -> EngineClient:
    return engine
