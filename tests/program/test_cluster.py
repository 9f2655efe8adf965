from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from microserving.errors import ConfigError, EngineUnavailable, NoEngine
from microserving.policies import POLICIES
from microserving.program import Cluster, EngineClient, EngineLoad, EngineRole, Pool
from microserving.program.backlog import Backlog
from microserving.program.testing import FakeCluster, FakeEngine, make_request


def ids(engines: object) -> list[str]:
    return [engine.id for engine in engines]  # type: ignore[attr-defined]


def as_it_is(engine: EngineClient) -> EngineClient:
    return engine


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


PROMPT = list(range(400))


def test_every_policy_is_a_method_of_the_pool() -> None:
    request = make_request(PROMPT)
    for name in POLICIES:
        cluster = FakeCluster(decode=1)
        assert cluster.decode.choose(name, request).id == "decode-0"
        method = getattr(Pool, name)
        needs_request = method.__code__.co_argcount == 2
        chosen = method(cluster.decode, request) if needs_request else method(cluster.decode)
        assert chosen.id == "decode-0"


@pytest.mark.parametrize("policy", ["prompt_length", "prefix_aware"])
def test_some_policies_need_the_request(policy: str) -> None:
    with pytest.raises(ValueError, match=f"the policy '{policy}' needs the request"):
        FakeCluster().decode.choose(policy)


def test_a_prompt_goes_where_its_beginning_went() -> None:
    cluster = FakeCluster(prefill=0, decode=3)
    first = cluster.decode.prefix_aware(make_request(PROMPT))
    others = {cluster.decode.prefix_aware(make_request([i] * 400)).id for i in range(20)}
    assert len(others) == 3
    for length in (400, 200, 64):
        assert cluster.all.prefix_aware(make_request([*PROMPT[:length], 7, 8])).id == first.id


def test_what_was_sent_under_another_salt_is_not_seen() -> None:
    cluster = FakeCluster(prefill=0, decode=2)
    red = [cluster.decode.prefix_aware(make_request(PROMPT, cache_salt="red")).id for _ in range(4)]
    assert len(set(red)) == 1
    cluster.decode.prefix_aware(make_request([1] * 400))  # so that it is nobody's turn by chance
    blue = [cluster.decode.prefix_aware(make_request(PROMPT, cache_salt=f"blue {i}")).id for i in range(4)]
    assert len(set(blue)) == 2


def test_exact_asks_the_engines_and_believes_the_index_of_those_that_fail() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(prefill=0, decode=3)
        request = make_request(PROMPT)
        cluster["decode-1"].matched = 300
        cluster["decode-2"].failures["match_prefix"] = EngineUnavailable("gone")
        assert list((await cluster.decode.matched(request)).values()) == [0, 300, 0]
        assert (await cluster.decode.prefix_aware_exact(request)).id == "decode-1"
        cluster["decode-1"].matched = 0
        cluster.index.routed(cluster.index.look_up("", PROMPT), "r", "decode-2")
        assert list((await cluster.decode.matched(request)).values()) == [0, 0, 384]
        assert (await cluster.decode.prefix_aware_exact(request)).id == "decode-2"

    asyncio.run(scenario())


def test_a_burst_is_spread_before_the_load_is_told() -> None:
    """Long prompts in one go: each one counts for the next, until the engine says itself what it has."""
    cluster = FakeCluster(prefill=2, decode=0)
    for engine in cluster.engines.values():
        engine.load = EngineLoad(prefill_tokens_per_s=1000.0)
    burst = [cluster.prefill.prompt_length(make_request(range(1000))).id for _ in range(6)]
    assert Counter(burst) == {"prefill-0": 3, "prefill-1": 3}
    cluster["prefill-0"].load = EngineLoad(prefill_tokens_per_s=1000.0)  # it is done with its three
    after = [cluster.prefill.prompt_length(make_request(range(1000))).id for _ in range(3)]
    assert after == ["prefill-0"] * 3


class Serving(FakeEngine):
    """Tells any number of requests in flight."""

    running = 0

    @property
    def in_flight(self) -> int:
        return self.running


@pytest.mark.case("RT-03")
def test_a_hot_prefix_does_not_overload_one_engine() -> None:
    """1,000 requests with one system prompt of 400 tokens; every one runs for 24 arrivals, 40 when it is no hit."""
    engines = [Serving(f"decode-{i}", "decode") for i in range(4)]
    pool = Pool("decode", lambda: engines)
    ends: list[tuple[int, Serving]] = []
    holders: set[str] = set()
    worst = 0.0
    for now in range(1000):
        for end, engine in [pair for pair in ends if pair[0] <= now]:
            engine.running -= 1
            ends.remove((end, engine))
        chosen = pool.prefix_aware(make_request([*PROMPT, *([now] * 40)], request_id=str(now)))
        assert isinstance(chosen, Serving)
        chosen.running += 1
        ends.append((now + (24 if chosen.id in holders else 40), chosen))
        holders.add(chosen.id)
        if now >= 100:
            loads = [engine.running for engine in engines]
            worst = max(worst, max(loads) / (sum(loads) / 4))
    assert worst <= 1.5
    assert len(holders) >= 2


def test_little_traffic_stays_where_its_prefix_is() -> None:
    engines = [Serving(f"decode-{i}", "decode") for i in range(4)]
    pool = Pool("decode", lambda: engines)
    chosen = {pool.prefix_aware(make_request([*PROMPT, i])).id for i in range(50)}
    assert len(chosen) == 1


def test_roles_change_at_run_time() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(prefill=2, decode=1)
        roles: list[tuple[EngineRole, list[str], list[str]]] = [
            ("decode", ["prefill-0"], ["prefill-1", "decode-0"]),
            ("hybrid", ["prefill-0", "prefill-1"], ["prefill-1", "decode-0"]),
            ("prefill", ["prefill-0", "prefill-1"], ["decode-0"]),
        ]
        for role, prefill, decode in roles:
            await cluster.set_role(cluster["prefill-1"], role)
            assert (ids(cluster.prefill), ids(cluster.decode)) == (prefill, decode)
        bound = cluster.bound(seen=as_it_is, chosen=as_it_is)
        await bound.set_role(cluster["decode-0"], "prefill")
        assert (len(cluster.decode), bound.metrics) == (0, cluster.metrics)
        with pytest.raises(ValueError, match="unknown role 'router'"):
            await cluster.set_role(cluster["decode-0"], "router")  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_fixed_roles_are_refused_with_a_typed_error() -> None:
    cluster = Cluster(prefill=list, decode=list, all=list)
    with pytest.raises(ConfigError, match="are fixed"):
        asyncio.run(cluster.set_role(FakeEngine("e", "decode"), "prefill"))


@pytest.mark.parametrize("strictly", [False, True])
def test_engines_that_an_attempt_does_without(strictly: bool) -> None:
    cluster = FakeCluster(decode=2)
    without: set[EngineClient] = set()
    bound = cluster.bound(seen=as_it_is, chosen=as_it_is, without=without, strictly=strictly)
    assert len(bound.decode) == 2
    without.add(cluster["decode-0"])
    assert ids(bound.decode) == ["decode-1"]
    assert [bound.decode.round_robin().id for _ in range(3)] == ["decode-1"] * 3
    without.add(cluster["decode-1"])
    if strictly:
        with pytest.raises(NoEngine):
            bound.decode.least_loaded()
    else:
        assert len(bound.decode) == 2
    assert len(cluster.decode) == 2


def test_a_backlog_is_worked_off_until_the_load_is_told_again() -> None:
    now = 100.0
    backlog = Backlog(lambda: now)
    engine = FakeEngine("e", "prefill")
    engine.load = EngineLoad(queued_prefill_tokens=200, prefill_tokens_per_s=100.0)
    assert backlog.tokens(engine) == 200
    backlog.add(engine, 300)
    now = 102.0
    assert backlog.tokens(engine) == 300  # 2 s at 100 tokens/s
    backlog.add(engine, 50)
    now = 103.0
    assert backlog.tokens(engine) == 250
    now = 200.0
    assert backlog.tokens(engine) == 0
    engine.load = EngineLoad(queued_prefill_tokens=70, prefill_tokens_per_s=100.0)
    assert backlog.tokens(engine) == 70
    for number in range(100):
        backlog.add(FakeEngine(f"e{number}", "prefill"), 10)
        backlog.arrived(FakeEngine(f"e{number}", "prefill"), engine, 10, 1)
        backlog.forget(f"e{number}")
    backlog.forget("nobody")
    assert set(backlog._known) == {"e"}
    assert not backlog._for_prefill


def test_an_engine_on_both_sides_has_two_demands() -> None:
    """A hybrid engine gets one prompt a second for its prefill and, from another one, three for its outputs."""
    now = 0.0
    backlog = Backlog(lambda: now)
    hybrid, decode, prefill = (FakeEngine(name, "hybrid") for name in ("h", "d", "p"))
    for second in range(10):
        now = float(second)
        backlog.arrived(hybrid, decode, 100, 10)
        for third in range(3):
            now = second + third / 3
            backlog.arrived(prefill, hybrid, 40, 1000)
            backlog.arrived(prefill, decode, 0, 10)  # for the decode engine alone
    first, second = backlog.demand(hybrid, decode)[0], backlog.demand(prefill, hybrid)[1]
    assert (first.rate, first.tokens, first.output_tokens) == (pytest.approx(9 / now), 100, 10)
    assert (second.rate, second.tokens, second.output_tokens) == (pytest.approx(29 / now), 40, 256)
    assert backlog.demand(prefill, hybrid)[0].tokens == 40
    assert backlog.demand(hybrid, decode)[1].tokens < 100


def test_the_balanced_split_sees_what_comes() -> None:
    """p = d = 100 tokens/s, and nobody tells anything new meanwhile."""
    now = 0.0

    async def scenario() -> None:
        nonlocal now
        engines = FakeCluster().engines
        prefill, decode = engines["prefill-0"], engines["decode-0"]
        for engine in engines.values():
            engine.load = EngineLoad(prefill_tokens_per_s=100.0, decode_step_ms=100.0)
        cluster = Cluster(
            prefill=lambda: [prefill],
            decode=lambda: [decode],
            all=lambda: [prefill, decode],
            clock=lambda: now,
        )

        def end(max_tokens: int | None = None, matched: int = 0) -> int:
            return cluster.balanced_end(
                make_request(range(1000), max_tokens=max_tokens), matched, prefill, decode
            )

        for _ in range(3):  # few: nobody seems to come after them
            assert end() == 999
            now += 20.0
        # From the fourth on one of 10 s every 20 s: there is a queue, for which some of it is worth moving.
        light = end()
        assert 800 < light < 999
        now += 20.0
        assert end(matched=2000) == 999  # nothing of it is for the prefill engine, nor counts as coming there

        def after(prompts: int, seconds: float, max_tokens: int) -> int:
            nonlocal now
            for _ in range(prompts):
                now += seconds
                last = end(max_tokens)
            return last

        heavy = after(40, 12.0, 1)
        assert 500 <= heavy < light
        assert after(40, 12.0, 200) > heavy  # 20 s of output each, which the prompts would hold up
        assert after(20, 0.0, 1) < light  # a burst

    asyncio.run(scenario())
