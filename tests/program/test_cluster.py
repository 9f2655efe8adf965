from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from microserving.errors import NoEngine
from microserving.program import Cluster, EngineClient, EngineLoad
from microserving.program.testing import FakeCluster


def ids(engines: object) -> list[str]:
    return [engine.id for engine in engines]  # type: ignore[attr-defined]


def test_pools_in_stable_order() -> None:
    cluster = FakeCluster(prefill=2, decode=1)
    assert ids(cluster.prefill) == ["prefill-0", "prefill-1"]
    assert ids(cluster.decode) == ["decode-0"]
    assert ids(cluster.all) == ["prefill-0", "prefill-1", "decode-0"]
    assert (len(cluster.prefill), len(cluster.decode), len(cluster.all)) == (2, 1, 3)


def test_round_robin_belongs_to_the_pool() -> None:
    cluster = FakeCluster(prefill=2, decode=2)
    assert [cluster.prefill.round_robin().id for _ in range(3)] == ["prefill-0", "prefill-1", "prefill-0"]
    assert cluster.decode.round_robin().id == "decode-0"
    assert FakeCluster(prefill=2).prefill.round_robin().id == "prefill-0"


def test_a_bound_cluster_shares_the_turns() -> None:
    """Every request gets a view of its own; together they take turns."""
    cluster = FakeCluster(decode=3)
    seen: list[EngineClient] = []
    chosen: list[EngineClient] = []

    def bind(into: list[EngineClient]) -> Callable[[EngineClient], EngineClient]:
        def append(engine: EngineClient) -> EngineClient:
            into.append(engine)
            return engine

        return append

    def views() -> Cluster:
        return cluster.bound(seen=bind(seen), chosen=bind(chosen))

    ordered = [views().decode.round_robin().id for _ in range(4)]
    assert ordered == ["decode-0", "decode-1", "decode-2", "decode-0"]
    assert (ids(chosen), ids(seen)) == (ordered, [])
    assert ids(views().all) == ids(seen) == ids(cluster.all)


def test_engines_that_are_down_are_not_chosen() -> None:
    cluster = FakeCluster(decode=3)
    cluster["decode-1"].up = False
    assert Counter(cluster.decode.round_robin().id for _ in range(10)) == {"decode-0": 5, "decode-2": 5}


def test_most_free_memory_uses_the_load() -> None:
    cluster = FakeCluster(decode=2)
    cluster["decode-0"].load = EngineLoad(free_pages=1, cached_pages=1, total_pages=10)
    cluster["decode-1"].load = EngineLoad(free_pages=5, total_pages=20)
    assert cluster.decode.most_free_memory().id == "decode-1"


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ("prefill", "no prefill engine is reachable"),
        ("decode", "no decode engine is reachable"),
        ("all", "no engine is reachable"),
    ],
)
def test_no_engine(pool: str, message: str) -> None:
    cluster = FakeCluster(prefill=0, decode=0)
    with pytest.raises(NoEngine, match=f"^{message}$") as caught:
        getattr(cluster, pool).least_loaded()
    assert caught.value.retry_after_s is not None


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown policy 'best'; there are: round_robin, least_loaded"):
        FakeCluster().all.choose("best")
