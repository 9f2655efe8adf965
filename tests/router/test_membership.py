"""Engines that come, go, change sides, fail again and again, or speak less than ours: a router over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from microserving.errors import ConfigError
from microserving.router.app import Router
from microserving.router.config import RouterConfig

from .engine_server import DONE, USAGE, EngineServer, choice, event, tokenizer_document

TOKENS = [choice("a", [1]), choice("b", [2]), choice("c", [3], "stop"), USAGE, DONE]


class Running:
    """A started router over some scripted engines, and a client in front of it."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.registry = router._registry
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(router.app), base_url="http://router", timeout=10
        )

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"prompt": [5, 6, 7, 8], "max_tokens": 9} | fields
        return await self.http.post("/v1/completions", json=body)

    async def streamed(self) -> str:
        return (await self.complete(stream=True)).text

    def ids(self, pool: str) -> list[str]:
        return [engine.id for engine in getattr(self.registry.cluster, pool)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - what is tested has no event
                await asyncio.sleep(0.002)


def run(
    scenario: Callable[[Running, list[EngineServer]], Awaitable[None]],
    infos: list[dict[str, Any]],
    program: str = "round_robin",
    *,
    prefill: int = 0,
    make: type[EngineServer] = EngineServer,
    **fields: Any,
) -> None:
    """The first ``prefill`` of the engines are prefill peers, the others decode peers."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(make(**info)) for info in infos]
            urls = [engine.url for engine in engines]
            peers = {"prefill_peers": urls[:prefill], "decode_peers": urls[prefill:]}
            given = {"program": program, "probe_interval_s": 0.05} | peers | fields
            router = Router(RouterConfig.model_validate(given))
            await router.start()
            running = Running(router)
            try:
                async with asyncio.timeout(30):
                    await scenario(running, engines)
            finally:
                for engine in engines:
                    engine.thawed.set()
                await running.http.aclose()
                await router.stop()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


ONE, TWO = {"engine_id": "decode-0"}, {"engine_id": "decode-1"}


@pytest.mark.case("RT-10")
@pytest.mark.parametrize("served", [None, "tiny"])
def test_a_router_may_start_before_its_engines(served: str | None) -> None:
    async def scenario(running: Running, _: list[EngineServer]) -> None:
        response = await running.complete(model="tiny")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_engine")
        assert int(response.headers["retry-after"]) >= 1
        other = await running.complete(model="other")
        listed = await running.http.get("/v1/models")
        if served is None:  # nobody has said yet which models there are
            assert (other.status_code, listed.status_code) == (503, 503)
        else:
            assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
            assert [card["id"] for card in listed.json()["data"]] == ["tiny"]
        assert (await running.http.get("/health")).status_code == 200
        assert (await running.http.get("/ready")).status_code == 503
        async with EngineServer(engine_id="decode-0") as engine:
            running.registry.add(engine.url, "decode")
            await running.until(lambda: running.ids("all") == ["decode-0"])
            assert (await running.complete(model="tiny")).status_code == 200
            assert (await running.complete(model="other")).status_code == 404
            await running.registry.remove("decode-0")

    run(scenario, [], allow_missing_peers=True, served_model=served)


def test_an_engine_with_another_model_than_the_named_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="it serves tiny, not large"):
        run(cast(Any, None), [ONE], served_model="large")


def test_an_engine_joins_and_leaves() -> None:
    async def scenario(running: Running, engines: list[EngineServer]) -> None:
        registry = running.registry
        async with EngineServer(engine_id="decode-1") as late:
            registry.add(late.url, "decode")
            await running.until(lambda: running.ids("decode") == ["decode-0", "decode-1"])
            assert [(await running.complete()).status_code for _ in range(4)] == [200] * 4
            assert late.verbs.count("start_generate") == 2
            with pytest.raises(ConfigError, match="is an engine of this router already"):
                registry.add(late.url, "prefill")
            with pytest.raises(ConfigError, match="is not the address of an engine"):
                registry.add("ftp://x", "prefill")
            await registry.remove(late.url)
            assert running.ids("all") == ["decode-0"]
            with pytest.raises(ConfigError, match="there is no engine 'decode-1'"):
                await registry.remove("decode-1")
            asked = len(late.requests)
            assert [(await running.complete()).status_code for _ in range(3)] == [200] * 3
            await asyncio.sleep(0.15)
            assert len(late.requests) <= asked + 1  # one probe was under way; none comes after it

    run(scenario, [ONE])


@pytest.mark.case("RT-14")
def test_draining_affects_admission_only() -> None:
    """Streams and hand-offs under way end on the engine; nothing new goes there; then it is removed."""

    async def scenario(running: Running, engines: list[EngineServer]) -> None:
        registry, gate = running.registry, asyncio.Event()
        engines[0].stream = [TOKENS[0], gate, *TOKENS[1:]]
        first = asyncio.create_task(running.streamed())
        await running.until(lambda: "start_generate" in engines[0].verbs)
        removing = asyncio.create_task(registry.remove("decode-0"))
        await running.until(lambda: running.ids("all") == ["decode-1"])
        stats = (await running.http.get("/router/stats")).json()["engines"]
        assert [(engine["id"], engine["state"]) for engine in stats] == [
            ("decode-0", "draining"),
            ("decode-1", "up"),
        ]
        assert [(await running.complete()).status_code for _ in range(3)] == [200] * 3
        assert engines[0].verbs.count("start_generate") == 1
        assert not removing.done()
        gate.set()
        assert (await first).count("data: [DONE]") == 1
        await removing
        assert not registry.in_flight
        assert [peer.client.id for peer in registry.peers] == ["decode-1"]

    run(scenario, [ONE, TWO])


@pytest.mark.parametrize("way", ["drain", "remove"])
def test_what_takes_too_long_goes_on_elsewhere(way: str) -> None:
    async def scenario(running: Running, engines: list[EngineServer]) -> None:
        engines[0].stream = [TOKENS[0], asyncio.Event()]
        engines[1].stream = TOKENS[1:]
        first = asyncio.create_task(running.streamed())
        await running.until(lambda: engines[0].verbs == ["start_generate"])
        await asyncio.sleep(0.05)  # its first token is on the way to the client
        if way == "drain":
            await running.registry.drain("decode-0", timeout_s=0.05)
        else:
            await running.registry.remove("decode-0", drain=False)
        text = await first
        assert text.count("data: [DONE]") == 1
        assert [text.count(f'"text":"{letter}"') for letter in "abc"] == [1, 1, 1]
        assert engines[1].bodies[-1][1]["resume_output_ids"] == [1]
        if way == "drain":
            running.registry.undrain("decode-0")
            engines[0].stream = TOKENS
            assert running.ids("all") == ["decode-0", "decode-1"]
            assert [(await running.complete()).status_code for _ in range(4)] == [200] * 4

    run(scenario, [ONE, TWO])


@pytest.mark.parametrize("way", ["drain", "remove"])
def test_an_engine_that_is_wanted_again_while_it_is_drained_keeps_its_requests(way: str) -> None:
    async def scenario(running: Running, engines: list[EngineServer]) -> None:
        registry, gate = running.registry, asyncio.Event()
        engines[0].stream = [TOKENS[0], gate, *TOKENS[1:]]
        first = asyncio.create_task(running.streamed())
        await running.until(lambda: engines[0].verbs == ["start_generate"])
        leaving = asyncio.create_task(
            registry.drain("decode-0") if way == "drain" else registry.remove("decode-0")
        )
        await running.until(lambda: running.ids("all") == ["decode-1"])
        registry.undrain("decode-0")
        with pytest.raises(ConfigError, match="was given requests again meanwhile"):
            await leaving
        gate.set()
        assert (await first).count("data: [DONE]") == 1
        assert [engine.verbs.count("start_generate") for engine in engines] == [1, 0]
        assert [peer.status for peer in registry.peers] == ["up", "up"]
        await registry.drain("decode-0")  # as if nothing had been
        assert running.ids("all") == ["decode-1"]

    run(scenario, [ONE, TWO], engine_drain_timeout_s=0.1)


def test_an_engine_changes_sides() -> None:
    async def scenario(running: Running, engines: list[EngineServer]) -> None:
        cluster = running.registry.cluster
        (mover,) = [engine for engine in cluster.decode if engine.id == "decode-1"]
        await cluster.set_role(mover, "prefill")
        assert (running.ids("prefill"), running.ids("decode")) == (["prefill-0", "decode-1"], ["decode-0"])
        assert [(await running.complete()).status_code for _ in range(4)] == [200] * 4
        assert "remote_send" in engines[2].verbs
        assert "prep_recv" not in engines[2].verbs
        await cluster.set_role(mover, "hybrid")
        assert running.ids("decode") == ["decode-0", "decode-1"]
        with pytest.raises(ConfigError):
            await running.registry.set_role("nobody", "decode")

    run(scenario, [{"engine_id": "prefill-0"}, ONE, TWO], "prefill_decode", prefill=1)


def test_an_engine_that_answers_probes_but_fails_requests_is_tried_now_and_then() -> None:
    async def scenario(running: Running, engines: list[EngineServer]) -> None:
        bad = engines[0]
        bad.answers["start_generate"] = (500, {"error": {"message": "bug", "code": "internal_error"}}, {})
        statuses = [(await running.complete()).status_code for _ in range(20)]
        assert statuses == [200] * 20
        assert bad.verbs.count("start_generate") == 3
        (state, _) = [
            engine["state"] for engine in (await running.http.get("/router/stats")).json()["engines"]
        ]
        assert state == "tripped"
        del bad.answers["start_generate"]
        await running.until(lambda: "decode-0" in running.ids("all"))  # one trial is allowed
        assert [(await running.complete()).status_code for _ in range(4)] == [200] * 4
        assert running.registry.peers[0].status == "up"

    run(scenario, [ONE, TWO], circuit_failures=3)


def test_of_a_tripped_engine_one_request_at_a_time_is_a_trial() -> None:
    async def scenario(running: Running, engines: list[EngineServer]) -> None:
        registry, (peer, _) = running.registry, running.registry.peers
        registry._outcome(peer.client, False)
        assert running.ids("all") == ["decode-1"]
        peer.circuit._until = 0.0  # the pause is over
        gate = asyncio.Event()
        engines[0].stream = [gate, *TOKENS]
        assert running.ids("all") == ["decode-0", "decode-1"]
        trial = asyncio.create_task(running.streamed())
        await running.until(lambda: "start_generate" in engines[0].verbs)
        assert running.ids("all") == ["decode-1"]
        gate.set()
        assert "[DONE]" in await trial
        assert running.ids("all") == ["decode-0", "decode-1"]

    run(scenario, [ONE, TWO], circuit_failures=1)


@pytest.mark.case("RT-12")
def test_a_frozen_engine_is_found_and_its_streams_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """It accepts connections and is silent, as one that was stopped (SIGSTOP)."""

    async def scenario(running: Running, engines: list[EngineServer]) -> None:
        engines[0].stream = [TOKENS[0], asyncio.Event()]
        engines[1].stream = TOKENS[1:]
        first = asyncio.create_task(running.streamed())
        await running.until(lambda: "start_generate" in engines[0].verbs)
        await asyncio.sleep(0.05)
        engines[0].thawed.clear()
        text = await first
        assert text.count("data: [DONE]") == 1
        assert [text.count(f'"text":"{letter}"') for letter in "abc"] == [1, 1, 1]
        assert running.ids("all") == ["decode-1"]
        engines[0].thawed.set()
        await running.until(lambda: running.ids("all") == ["decode-0", "decode-1"])

    run(scenario, [ONE, TWO], probe_timeout_s=0.1, probe_misses=2)


class VerbsOnly(EngineServer):
    """Knows MLC's three verbs and its fields: everything else is a 404, an unknown field a 422."""

    FIELDS = frozenset(
        """model prompt best_of echo frequency_penalty presence_penalty logprobs top_logprobs logit_bias max_tokens n
        seed stop stream stream_options suffix temperature top_p user response_format debug_config
        end begin kv_addr_info recv_rank""".split()  # noqa: SIM905 - a list of words reads better
    )

    def _routes(self) -> Any:
        verbs = ("prep_recv", "remote_send", "start_generate")
        kept = [route for route in super()._routes() if route.path.removeprefix("/microserving/") in verbs]
        return kept

    @property
    def unknown_fields(self) -> set[str]:
        return {name for _, body in self.bodies for name in body if name not in self.FIELDS}


MLC_STREAM = [
    event({"choices": [{"index": 0, "text": "Hel", "finish_reason": None}]}),
    event({"choices": [{"index": 0, "text": "lo", "finish_reason": "stop"}]}),
    event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}),
    DONE,
]


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(tokenizer_document()["tokenizer"])
    return tmp_path


def test_engines_that_know_only_three_verbs(tokenizer_dir: Path) -> None:
    async def scenario(running: Running, engines: list[EngineServer]) -> None:
        prefill, decode = cast(list[VerbsOnly], engines)
        decode.stream = list(MLC_STREAM)
        decode.answers["prep_recv"] = (200, {"kv_append_metadata": "M", "prefix_matched_length": 1}, {})
        prefill.answers["remote_send"] = (200, {}, {})
        assert (running.ids("prefill"), running.ids("decode")) == (["mlc-0"], ["mlc-1"])
        (client,) = running.registry.cluster.decode
        told = client.load
        await running.until(
            lambda: client.load is not told
        )  # it tells nothing, but what was sent it is done some day
        decode.bodies.clear()
        text = await running.streamed()
        assert ('"text":"Hel"' in text, '"text":"lo"' in text, text.count("[DONE]")) == (True, True, 1)
        (prep, start), (send,) = decode.bodies, prefill.bodies[-1:]
        assert (prep[0], prep[1]["end"], start[0], start[1]["begin"]) == ("prep_recv", 3, "start_generate", 3)
        assert {k: send[1][k] for k in ("begin", "end", "kv_addr_info", "recv_rank")} == {
            "begin": 1,
            "end": 3,
            "kv_addr_info": "M",
            "recv_rank": 1,
        }
        assert prep[1]["user"] == start[1]["user"] == send[1]["user"]
        assert prefill.unknown_fields | decode.unknown_fields == set()
        usage = (await running.complete(ignore_eos=True)).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 2)
        assert decode.bodies[-1][1]["debug_config"] == {"ignore_eos": True}
        refused = await running.complete(top_k=5)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_k")
        await running.until(lambda: not running.registry.in_flight)
        await decode.kill()
        assert (await running.complete()).status_code == 503

    run(
        scenario,
        [{}, {}],
        "prefill_decode",
        prefill=1,
        make=VerbsOnly,
        tokenizer_dir=tokenizer_dir,
    )


def test_without_a_tokenizer_such_an_engine_is_of_no_use() -> None:
    with pytest.raises(ConfigError, match="tokenizer_dir must name one"):
        run(cast(Any, None), [{}], make=VerbsOnly, peer_timeout_s=0.3)


class NoEngineAtAll(EngineServer):
    def _routes(self) -> Any:
        return []


def test_what_is_no_engine_is_told_so(tokenizer_dir: Path) -> None:
    with pytest.raises(ConfigError, match="is none: it knows no verb"):
        run(cast(Any, None), [{}], make=NoEngineAtAll, peer_timeout_s=0.3, tokenizer_dir=tokenizer_dir)
