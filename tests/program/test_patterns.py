"""What the shipped programs ask of which engine, on engines in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from microserving.errors import NoEngine
from microserving.program import EngineLoad, Program
from microserving.program.testing import Call, FakeCluster, collect, make_request
from microserving.router.program_loader import load_program

PROMPT = range(1000)


def program(name: str, **settings: object) -> Program:
    return load_program(name, settings).instance


async def run(
    served: Program, cluster: FakeCluster, prompt: Iterable[int] = PROMPT, request_id: str = "r"
) -> None:
    chunks = await collect(served.route(make_request(prompt, request_id=request_id), cluster))
    assert chunks[-1].finish_reason == "stop"
    assert not [engine.id for engine in cluster.engines.values() if engine.held]


def calls(cluster: FakeCluster, engine_id: str) -> list[tuple[str, int, int]]:
    return [(call.verb, call.begin, call.end) for call in cluster[engine_id].calls]


# balanced_prefill_decode


def test_auto_splits_by_live_loads() -> None:
    cluster = FakeCluster()
    cluster["prefill-0"].load = EngineLoad(prefill_tokens_per_s=300.0)
    cluster["decode-0"].load = EngineLoad(prefill_tokens_per_s=100.0)
    cluster["decode-0"].matched = 200
    served = program("balanced_prefill_decode", pd_balance_factor="auto")
    asyncio.run(run(served, cluster))
    assert calls(cluster, "decode-0") == [
        ("match_prefix", 0, 0),
        ("prep_recv", 0, 999),  # nobody waits for the prefill engine: it does all it can
        ("start_generate", 999, 1000),
    ]
    assert calls(cluster, "prefill-0") == [("remote_send", 200, 999)]
    for _ in range(3):  # with the first one four in no time, and nobody tells of a new load
        asyncio.run(run(served, cluster))
    # More than they can do: both are busy for as long when (e - 200) / 300 == (1000 - e) / 100.
    *_, (verb, _, end), _ = calls(cluster, "decode-0")
    assert (verb, end) == ("prep_recv", pytest.approx(800, abs=65))  # as about as good will do (NO_MATTER)


def test_auto_leaves_the_prefill_engine_out_when_most_is_cached() -> None:
    cluster = FakeCluster()
    cluster["decode-0"].matched = 950
    asyncio.run(run(program("balanced_prefill_decode", pd_balance_factor="auto"), cluster))
    assert calls(cluster, "decode-0") == [("match_prefix", 0, 0), ("start_generate", 0, 1000)]
    assert calls(cluster, "prefill-0") == []


def test_the_decode_engine_does_all_at_factor_1() -> None:
    cluster = FakeCluster()
    asyncio.run(run(program("balanced_prefill_decode", pd_balance_factor="1"), cluster))
    assert cluster.calls == [("decode-0", "start_generate")]


# prefix_aware


@pytest.mark.parametrize("exact", [False, True])
def test_a_conversation_stays_on_its_engine(exact: bool) -> None:
    async def scenario() -> None:
        cluster = FakeCluster(prefill=1, decode=2, caching=True)
        served = program("prefix_aware", exact=exact)
        for turn in range(1, 5):
            for conversation in range(3):
                prompt = [conversation] * (100 * turn)
                await run(served, cluster, prompt, f"{conversation}-{turn}")
        for engine in cluster.engines.values():
            engine_conversations = {
                call.request_id[0] for call in engine.calls if call.verb == "start_generate"
            }
            assert len(engine_conversations) == 1
        asked = sum(
            call.verb == "match_prefix" for engine in cluster.engines.values() for call in engine.calls
        )
        assert asked == (3 * 12 if exact else 0)

    asyncio.run(scenario())


# context_migration


def test_a_context_follows_to_the_engine_that_generates() -> None:
    """The idle engine gets the context of the busy one, and has it from then on."""

    async def scenario() -> None:
        cluster = FakeCluster(prefill=0, decode=2, caching=True)
        busy, idle = cluster["decode-0"], cluster["decode-1"]
        served = program("context_migration")
        await run(served, cluster, range(500), "first")
        assert calls(cluster, "decode-0")[-1] == ("start_generate", 0, 500)
        for number in range(5):  # others keep it busy
            await busy.prep_recv(make_request([7], request_id=f"other {number}"), end=0)
        chunks = await collect(served.route(make_request(range(600), request_id="second"), cluster))
        assert calls(cluster, "decode-1")[-3:] == [
            ("prep_recv", 0, 600),
            ("commit", 0, 0),
            ("start_generate", 0, 600),
        ]
        assert busy.calls[-1] == Call("remote_send", "second", 0, 600)
        assert chunks[-1].cached_tokens == 599  # it is a hit where it was moved to
        await collect(served.route(make_request(range(700), request_id="third"), cluster))
        assert calls(cluster, "decode-1")[-2:] == [("match_prefix", 0, 0), ("start_generate", 0, 700)]
        assert not idle.held

    asyncio.run(scenario())


def test_a_context_stays_while_its_engine_is_not_much_busier() -> None:
    async def scenario() -> None:
        cluster = FakeCluster(prefill=0, decode=2)
        cluster["decode-0"].matched = 400
        await cluster["decode-0"].prep_recv(make_request([7], request_id="other"), end=0)
        await collect(program("context_migration").route(make_request(PROMPT, request_id="r"), cluster))
        assert calls(cluster, "decode-0")[-1] == ("start_generate", 0, 1000)
        assert calls(cluster, "decode-1") == [("match_prefix", 0, 0)]

    asyncio.run(scenario())


def test_a_short_context_is_computed_again() -> None:
    cluster = FakeCluster(prefill=0, decode=2)
    cluster["decode-0"].matched = 63
    asyncio.run(run(program("context_migration"), cluster))
    verbs = {verb for _, verb in cluster.calls}
    assert verbs == {"match_prefix", "start_generate"}


@pytest.mark.parametrize("name", ["context_migration", "prefix_aware", "adaptive", "balanced_prefill_decode"])
def test_without_engines_there_is_one_clean_error(name: str) -> None:
    with pytest.raises(NoEngine):
        asyncio.run(run(program(name), FakeCluster(prefill=0, decode=0)))


# adaptive


def test_whole_or_apart() -> None:
    cluster = FakeCluster()
    asyncio.run(run(program("adaptive"), cluster))
    assert cluster.calls == [("prefill-0", "start_generate")]
    cluster = FakeCluster()
    asyncio.run(run(program("adaptive", apart=True), cluster))
    assert cluster.calls == [
        ("prefill-0", "remote_send"),
        ("decode-0", "prep_recv"),
        ("decode-0", "start_generate"),
    ]


def test_one_engine_in_both_pools_sends_itself_nothing() -> None:
    cluster = FakeCluster(prefill=0, decode=1)
    cluster["decode-0"].role = "hybrid"
    asyncio.run(run(program("adaptive", apart=True), cluster))
    assert cluster.calls == [("decode-0", "start_generate")]


class Planned:
    """A plan at work: each ``round`` gives it latencies and one interval."""

    def __init__(self, cluster: FakeCluster, **settings: object) -> None:
        self.cluster = cluster
        self.program = program("adaptive", interval_s=0.0, **settings)
        self.plan = asyncio.create_task(self.program.plan(cluster))

    async def rounds(self, count: int, *, ttft_s: float, itl_s: float) -> None:
        for _ in range(count):
            for _ in range(20):
                self.cluster.metrics.add_ttft("decode", ttft_s)
                self.cluster.metrics.add_itl("decode", itl_s)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    @property
    def pools(self) -> tuple[int, int]:
        return len(self.cluster.prefill), len(self.cluster.decode)

    async def stop(self) -> None:
        assert not self.plan.done()
        self.plan.cancel()
        await asyncio.wait([self.plan])


def test_the_plan_follows_the_traffic() -> None:
    """From prompt-heavy to output-heavy and back: engines change sides, each side keeps one."""

    async def scenario() -> None:
        planned = Planned(FakeCluster(prefill=2, decode=2), ttft_ms=2000, itl_ms=100)
        assert not planned.program.apart  # type: ignore[attr-defined]
        await planned.rounds(20, ttft_s=0.5, itl_s=0.02)
        assert not planned.program.apart  # type: ignore[attr-defined]
        await planned.rounds(3, ttft_s=0.5, itl_s=0.5)
        assert planned.program.apart  # type: ignore[attr-defined]
        assert planned.pools == (2, 2)
        await planned.rounds(20, ttft_s=0.5, itl_s=0.5)
        assert planned.pools == (1, 3)
        await planned.rounds(40, ttft_s=9.0, itl_s=0.02)
        assert planned.pools == (3, 1)
        assert not planned.program.apart  # type: ignore[attr-defined] # nobody is left to take an engine from
        await planned.stop()

    asyncio.run(scenario())


def test_the_plan_does_not_swing() -> None:
    """Latencies near their objectives, and one bad round now and then, change nothing."""

    async def scenario() -> None:
        planned = Planned(FakeCluster(prefill=2, decode=2), apart=True)
        for _ in range(10):
            await planned.rounds(3, ttft_s=1.9, itl_s=0.09)
        assert planned.pools == (2, 2)
        await planned.rounds(30, ttft_s=9.0, itl_s=0.5)  # both are missed
        assert planned.pools == (2, 2)
        await planned.stop()

    asyncio.run(scenario())
