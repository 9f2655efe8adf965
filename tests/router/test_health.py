"""Which engines are up, who may join, and how the router notices, with real sockets."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from microserving.errors import ConfigError, EngineUnavailable, NoEngine
from microserving.program.testing import collect
from microserving.router.health import REFRESH_GAP_S
from microserving.router.holdings import Holdings
from microserving.router.loop_lag import LoopLag

from .engine_server import STREAM, EngineServer
from .watching import PREFILL, REQUEST, engines, run, watched


def test_connect_and_pools() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        one, two, both = await engines(stack, PREFILL, {}, {"engine_id": "hybrid-0", "max_context": 400})
        watch = watched(stack, [one, both], [two, both])
        assert not watch.monitor.ready
        await watch.monitor.connect(5)
        assert watch.ids("prefill") == ["prefill-0", "hybrid-0"]
        assert watch.ids("decode") == ["hybrid-0", "decode-0"]
        assert watch.ids("all") == ["prefill-0", "hybrid-0", "decode-0"]
        assert [engine.role for engine in watch.registry.cluster.all] == ["prefill", "hybrid", "decode"]
        assert watch.tokenizers == [one.tokenizer]
        model = watch.monitor.model
        assert model is not None
        assert (model.id, model.max_context, model.created) == ("tiny", 400, 7)
        assert watch.monitor.ready

    run(scenario)


def test_a_missing_peer_is_named() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        one, gone, unready = await engines(stack, PREFILL, {}, {"engine_id": "decode-1"})
        await gone.kill()
        unready.ready = False
        watch = watched(stack, [one], [gone, unready])
        with pytest.raises(ConfigError) as caught:
            await watch.monitor.connect(0.3)
        assert caught.value.message == (
            f"no answer within 0.3 s from decode engine {gone.url} (the engine cannot be reached), "
            f"decode engine {unready.url} (not yet)"
        )

    run(scenario)


def test_a_peer_that_is_slow_to_start_is_waited_for() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        engine.ready = False
        watch = watched(stack, [], [engine])
        connecting = asyncio.create_task(watch.monitor.connect(5))
        await watch.until("down")
        engine.ready = True
        await connecting
        assert watch.states == ["up"]

    run(scenario)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            {"kv_layout_hash": "l2", "kv_bytes_per_token": 32},
            "kv_layout_hash l2 vs l1, kv_bytes_per_token 32 vs 64",
        ),
        ({"page_size": 32}, "page_size 32 vs 16"),
        ({"model_hash": "m2"}, "model_hash m2 vs m1"),
        ({"protocol_version": 2}, "protocol_version 2 vs 1"),
    ],
)
@pytest.mark.case("PD-22")
@pytest.mark.case("PD-24")
def test_a_pair_that_does_not_fit_is_refused_with_both_values(other: dict[str, Any], reason: str) -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        one, two = await engines(stack, PREFILL, {})
        watch = watched(stack, [one], [two])
        await watch.monitor.probe(watch.registry.peers[0])
        two.info |= other
        with pytest.raises(ConfigError) as caught:
            await watch.monitor.connect(5)
        assert caught.value.message == (
            f"decode engine {two.url} cannot be used: decode-0 does not fit prefill-0: {reason}"
        )
        assert watch.ids("decode") == []

    run(scenario)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (("aa", "bb"), "its cluster secret is another one"),
        (("aa", ""), "it has no cluster secret, the other has one"),
        (("", "bb"), "it has a cluster secret, the other has none"),
        (("aa", "aa"), None),
        (("", ""), None),
        (("aa", None), None),  # an engine that does not tell
        ((None, "bb"), None),
    ],
)
def test_an_engine_with_another_cluster_secret_is_refused(
    ids: tuple[str | None, str | None], reason: str | None
) -> None:
    """It would take requests, and fail each at its first hand-off."""

    async def scenario(stack: AsyncExitStack) -> None:
        one, two = await engines(stack, PREFILL, {})
        one.info["cluster_secret_id"], two.info["cluster_secret_id"] = ids
        watch = watched(stack, [one], [two])
        for peer in watch.registry.peers:
            await watch.monitor.probe(peer)
        refused = watch.registry.peers[1]
        assert (refused.state, refused.reason) == (
            ("up", "") if reason is None else ("refused", f"decode-0 does not fit prefill-0: {reason}")
        )

    run(scenario)


@pytest.mark.parametrize(
    ("transports", "warns"),
    [
        ({"shared_memory": {"domain": "d2"}}, True),
        ({"shared_memory": {"domain": "d1"}}, False),
        ({"other": {"domain": "d1"}}, True),
        ({"shared_memory": {"domain": "d2"}, "other": {}}, True),
        ({}, False),
    ],
)
def test_an_engine_that_no_other_can_hand_kv_to_is_told_of_once(
    transports: dict[str, dict[str, str]], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        one, two = await engines(stack, PREFILL, {})
        one.info["transports"], two.info["transports"] = {"shared_memory": {"domain": "d1"}}, transports
        watch = watched(stack, [one], [two])
        for peer in [*watch.registry.peers, *watch.registry.peers]:
            await watch.monitor.probe(peer)
        assert watch.states == ["up", "up"]
        told = [r.getMessage() for r in caplog.records if "cannot hand KV" in r.message]
        assert told == warns * [
            f"decode engine {two.url} and prefill-0 cannot hand KV to each other: "
            "give all engines of a host the same --runtime-dir"
        ]

    run(scenario)


def test_a_node_id_that_is_taken_is_refused() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        one, two = await engines(stack, {}, {})
        with pytest.raises(ConfigError, match="its node id 'decode-0' is that of decode engine http"):
            await watched(stack, [], [one, two]).monitor.connect(5)

    run(scenario)


def test_an_engine_that_moved_to_another_address_is_found_there() -> None:
    """By the id that it has kept; its old address is that of nobody known. What it had cached, it has no more."""

    async def scenario(stack: AsyncExitStack) -> None:
        (old,) = await engines(stack, {})
        watch = watched(stack, [], [old])
        await watch.monitor.connect(5)
        index = watch.registry.cluster.index
        index.routed(index.look_up("", range(500)), "r", "decode-0")
        await old.kill()
        (new,) = await engines(stack, {"epoch": "e2"})
        moved = watch.registry.add(new.url, "decode")
        for peer in watch.registry.peers:
            await watch.monitor.probe(peer)
        assert watch.states == ["down", "up"]
        assert watch.registry.find("decode-0") is moved
        assert watch.registry.peers[0].client.id == old.url
        assert index.look_up("", range(500)).remembered == {}
        await watch.registry.set_role("decode-0", "prefill")
        assert (watch.ids("prefill"), watch.ids("decode")) == (["decode-0"], [])

    run(scenario)


@pytest.mark.case("RT-06")
@pytest.mark.case("PD-18")
def test_a_dead_engine_is_left_out_at_once_and_a_restarted_one_taken_over() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        one, two = await engines(stack, {}, {"engine_id": "decode-1"})
        watch = watched(stack, [], [one, two], interval_s=30)
        await watch.monitor.connect(5)
        await one.kill()
        dead = next(iter(watch.registry.cluster.decode))
        with pytest.raises(EngineUnavailable, match="engine decode-0 cannot be reached"):
            await dead.prep_recv(REQUEST, end=1)
        assert watch.ids("decode") == ["decode-1"]  # without any probe

        port = int(one.url.rpartition(":")[2])
        await stack.enter_async_context(EngineServer(port, epoch="e2"))
        await watch.monitor.refresh()
        assert watch.ids("decode") == ["decode-0", "decode-1"]
        peer = watch.registry.peers[0]
        assert peer.client.info is not None
        assert peer.client.info.epoch == "e2"
        assert len(watch.tokenizers) == 1

    run(scenario)


def test_watching_notices_going_and_coming() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        watch = watched(stack, [], [engine])
        await watch.monitor.connect(5)
        watch.monitor.start()
        engine.ready = False
        await watch.until("down")
        with pytest.raises(NoEngine):
            watch.registry.cluster.decode.round_robin()
        assert not watch.monitor.ready
        assert watch.monitor.model is not None  # still known: 503, not 404
        engine.ready = True
        engine.load |= {"running": 9}
        await watch.until("up")
        assert next(iter(watch.registry.cluster.decode)).load.running == 9

    run(scenario)


def test_a_broken_connection_asks_for_a_probe_at_once() -> None:
    """One request that breaks its connection does not cost the engine a whole probe interval."""

    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        watch = watched(stack, [], [engine], interval_s=30)
        await watch.monitor.connect(5)
        watch.monitor.start()
        async with asyncio.timeout(5):
            while not watch.registry.peers[0].suspect._waiters:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(
                    0.002
                )  # until the first probe is over and the next one half a minute away
        engine.stream = [STREAM[0], RuntimeError("dies")]
        with pytest.raises(EngineUnavailable):
            await collect(next(iter(watch.registry.cluster.decode)).start_generate(REQUEST))
        assert watch.ids("decode") == []
        await watch.until("up")

    run(scenario)


@pytest.mark.case("RT-12")
def test_a_frozen_engine_is_down_after_some_misses_and_its_streams_end() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        engine.stream = [STREAM[0], asyncio.Event()]
        watch = watched(stack, [], [engine], timeout_s=0.2, misses=3)
        await watch.monitor.connect(5)
        stream = collect(next(iter(watch.registry.cluster.decode)).start_generate(REQUEST))
        reading = asyncio.create_task(stream)
        engine.thawed.clear()
        peer = watch.registry.peers[0]
        for misses in (1, 2):
            await watch.monitor.probe(peer)
            assert (peer.state, peer.misses) == ("up", misses)
        await watch.monitor.probe(peer)
        assert peer.state == "down"
        with pytest.raises(EngineUnavailable, match="engine decode-0 does not answer"):
            await reading
        engine.thawed.set()
        await watch.monitor.probe(peer)
        assert (peer.state, peer.misses) == ("up", 0)

    run(scenario)


@pytest.mark.case("RT-12")
def test_what_is_sent_elsewhere_to_a_frozen_engine_ends_with_it() -> None:
    """The client does not wait until the sender's own timeout."""

    async def scenario(stack: AsyncExitStack) -> None:
        sender, receiver = await engines(stack, PREFILL, {})
        watch = watched(stack, [sender], [receiver], timeout_s=0.1, misses=2)
        await watch.monitor.connect(5)
        holdings = Holdings(watch.registry.in_flight)
        cluster = watch.registry.cluster.bound(seen=holdings.bind, chosen=holdings.choose)
        received = await cluster.decode.round_robin().prep_recv(REQUEST, end=2)
        sender.thawed.clear()
        sending = asyncio.ensure_future(cluster.prefill.round_robin().remote_send(REQUEST, to=received))
        await sender.frozen_by.wait()
        receiver.thawed.clear()
        for _ in range(2):
            assert not sending.done()
            await watch.monitor.probe(watch.registry.peers[1])
        with pytest.raises(EngineUnavailable, match="engine decode-0 does not answer"):
            await sending
        sender.thawed.set()
        receiver.thawed.set()
        await holdings.release(5)
        assert sender.verbs == ["remote_send", "abort"]
        assert receiver.verbs == ["prep_recv", "abort"]

    run(scenario)


def test_a_probe_that_our_own_loop_was_too_late_for_does_not_count() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        watch = watched(stack, [], [engine], timeout_s=0.2, misses=1)
        await watch.monitor.connect(5)
        peer = watch.registry.peers[0]
        engine.thawed.clear()
        probing = asyncio.create_task(watch.monitor.probe(peer))
        await engine.frozen_by.wait()
        time.sleep(0.4)  # noqa: ASYNC251 - the loop is busy
        await probing
        assert (peer.state, peer.misses) == ("up", 0)
        await watch.monitor.probe(peer)
        assert peer.state == "down"

    run(scenario)


def test_the_lag_of_a_loop() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        with LoopLag() as idle:
            await asyncio.sleep(0.2)
        assert idle.share < 0.5
        with LoopLag() as blocked:
            for _ in range(2):
                time.sleep(0.3)  # noqa: ASYNC251 - the loop is busy
                await asyncio.sleep(0)
        assert 0.7 < blocked.share <= 1.0  # two timers of 0.05 s, late by 0.25 s each

    run(scenario)


def test_one_miss_is_forgiven() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        watch = watched(stack, [], [engine], timeout_s=0.2)
        await watch.monitor.connect(5)
        peer = watch.registry.peers[0]
        for _ in range(4):
            engine.thawed.clear()
            await watch.monitor.probe(peer)
            engine.thawed.set()
            await watch.monitor.probe(peer)
        assert peer.state == "up"

    run(scenario)


def test_refreshes_are_one_at_a_time_and_seldom() -> None:
    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        watch = watched(stack, [], [engine])
        engine.ready = False

        def probes() -> int:
            return engine.requests.count("/ready")

        engine.thawed.clear()
        waiting = [asyncio.create_task(watch.monitor.refresh()) for _ in range(50)]
        await engine.frozen_by.wait()
        engine.thawed.set()
        await asyncio.gather(*waiting)
        await watch.monitor.refresh()
        assert probes() == 1
        await asyncio.sleep(REFRESH_GAP_S)  # the rule itself is about time
        engine.ready = True
        await watch.monitor.refresh()
        assert probes() == 2
        assert watch.monitor.ready
        await asyncio.sleep(REFRESH_GAP_S)
        await watch.monitor.refresh()  # nothing is missing
        assert probes() == 2

    run(scenario)


def test_stopping_does_not_cancel_those_who_wait_for_a_refresh() -> None:
    """They still have a client to answer."""

    async def scenario(stack: AsyncExitStack) -> None:
        (engine,) = await engines(stack, {})
        watch = watched(stack, [], [engine])
        engine.thawed.clear()
        waiting = asyncio.create_task(watch.monitor.refresh())
        await engine.frozen_by.wait()
        await watch.monitor.stop()
        await waiting
        assert not watch.monitor.ready

    run(scenario)
