"""The whole router over two scripted engines: OpenAI in, verbs out, and what clients see when engines fail."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from microserving.errors import ConfigError, ProgramError, StartupError
from microserving.protocol.responses import Usage
from microserving.router import RouterConfig
from microserving.router import app as router_app
from microserving.router.app import Router, create_app
from microserving.router.run import run_router

from .engine_server import STREAM, EngineServer, choice, event


class Setup:
    """prefill-0, decode-0, and a started router with an HTTP client in front of it."""

    def __init__(self, prefill: EngineServer, decode: EngineServer, router: Router) -> None:
        self.prefill = prefill
        self.decode = decode
        self.router = router
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(router.app), base_url="http://router", timeout=10
        )

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 9} | fields
        return await self.http.post("/v1/completions", json=body)

    async def stats(self) -> dict[str, Any]:
        return cast(dict[str, Any], (await self.http.get("/router/stats")).json())


def config(program: str, prefill: EngineServer, decode: EngineServer, **fields: Any) -> RouterConfig:
    peers = {"prefill_peers": [prefill.url], "decode_peers": [decode.url]}
    return RouterConfig.model_validate({"program": program, "peer_timeout_s": 5} | peers | fields)


def with_router(
    scenario: Callable[[Setup], Awaitable[None]], program: str = "prefill_decode", **fields: Any
) -> None:
    async def run() -> None:
        async with EngineServer(engine_id="prefill-0") as prefill, EngineServer() as decode:
            settings = config(program, prefill, decode, **fields)
            router = Router(settings)
            await router.start()
            setup = Setup(prefill, decode, router)
            try:
                await scenario(setup)
            finally:
                await setup.http.aclose()
                await router.stop()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_completion_through_the_verbs() -> None:
    async def scenario(setup: Setup) -> None:
        answer = (await setup.complete(user="me")).json()
        assert answer["choices"][0]["text"] == "Hello"
        assert answer["usage"] == Usage(4, completion_tokens=2).body()
        assert setup.decode.verbs == ["prep_recv", "start_generate"]
        assert setup.prefill.verbs == ["remote_send"]
        ids = {body["request_id"] for _, body in [*setup.decode.bodies, *setup.prefill.bodies]}
        assert len(ids) == 1
        assert "me" not in ids

    with_router(scenario)


@pytest.mark.case("PD-15")
def test_internal_ids_are_unique_whatever_the_client_sends() -> None:
    async def scenario(setup: Setup) -> None:
        await asyncio.gather(*(setup.complete(user="same", request_id="same") for _ in range(20)))
        ids = [body["request_id"] for verb, body in setup.decode.bodies if verb == "prep_recv"]
        assert len(set(ids)) == 20

    with_router(scenario)


def test_a_stream() -> None:
    async def scenario(setup: Setup) -> None:
        response = await setup.complete(stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line for line in response.text.splitlines() if line]
        assert events[-1] == "data: [DONE]"
        assert '"text":"Hel"' in events[0]

    with_router(scenario)


@pytest.mark.case("PD-34")
@pytest.mark.case("STR-03")
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_an_engine_is_a_real_status(stream: bool) -> None:
    async def scenario(setup: Setup) -> None:
        error = {"message": "full", "type": "t", "param": None, "code": "kv_exhausted"}
        setup.decode.answers["prep_recv"] = (503, {"error": error}, {"retry-after": "3"})
        response = await setup.complete(stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (503, "3")
        assert response.json()["error"]["code"] == "kv_exhausted"
        assert setup.prefill.verbs == []

    with_router(scenario)


@pytest.mark.case("PD-05")
def test_a_failed_send_frees_the_reservation() -> None:
    async def scenario(setup: Setup) -> None:
        error = {"message": "lost", "type": "t", "param": None, "code": "transfer_failed"}
        setup.prefill.answers["remote_send"] = (502, {"error": error}, {})
        response = await setup.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (502, "transfer_failed")
        await setup.router.stop()
        assert setup.decode.verbs == ["prep_recv", "abort"]
        assert setup.prefill.verbs == ["remote_send"]

    with_router(scenario, max_attempts=1)


def test_an_engine_that_dies_within_a_stream() -> None:
    async def scenario(setup: Setup) -> None:
        setup.decode.stream = [STREAM[0], RuntimeError("dies")]
        response = await setup.complete(stream=True)
        assert response.status_code == 200
        last = [line for line in response.text.splitlines() if line][-1]
        assert '"code":"engine_unavailable"' in last
        assert "[DONE]" not in response.text
        assert "127.0.0.1" not in response.text

    with_router(scenario, max_attempts=1)


@pytest.mark.case("RT-10")
def test_without_engines_it_is_503_and_with_them_again_it_works() -> None:
    async def scenario(setup: Setup) -> None:
        await setup.prefill.kill()
        await setup.decode.kill()
        assert (await setup.complete()).status_code == 503  # found out by this very request
        response = await setup.complete()
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "no_engine"
        assert (await setup.http.get("/ready")).status_code == 503
        assert (await setup.http.get("/health")).status_code == 200
        ports = [int(engine.url.rpartition(":")[2]) for engine in (setup.prefill, setup.decode)]
        async with (
            EngineServer(ports[0], engine_id="prefill-0", epoch="e2"),
            EngineServer(ports[1], epoch="e2"),
        ):
            async with asyncio.timeout(5):
                while (await setup.http.get("/ready")).status_code != 200:  # noqa: ASYNC110 - as a client would
                    await asyncio.sleep(0.01)
            assert (await setup.complete()).status_code == 200
        assert (await setup.complete(model="other")).status_code in (404, 503)

    with_router(scenario)


def test_round_robin_goes_on_with_one_of_two() -> None:
    async def scenario(setup: Setup) -> None:
        await setup.prefill.kill()
        statuses = [(await setup.complete()).status_code for _ in range(6)]
        assert statuses == [200] * 6

    with_router(scenario, "round_robin")


def test_stats_show_no_address() -> None:
    async def scenario(setup: Setup) -> None:
        gate = asyncio.Event()
        setup.decode.stream = [choice("a", [1]), gate, *STREAM[1:]]
        running = asyncio.create_task(setup.complete())
        async with asyncio.timeout(5):
            while "start_generate" not in setup.decode.verbs:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.001)
        stats = await setup.stats()
        assert stats["program"] == {
            "name": "balanced_prefill_decode",
            "settings": {"pd_balance_factor": 0.5},
            "version": 1,
            "rollbacks": 0,
        }
        assert stats["requests_in_flight"] == 1
        shown = [
            (engine["id"], engine["role"], engine["state"], engine["in_flight"])
            for engine in stats["engines"]
        ]
        assert shown == [("prefill-0", "prefill", "up", 0), ("decode-0", "decode", "up", 1)]
        assert stats["engines"][1]["load"]["free_pages"] == 40
        assert "127.0.0.1" not in str(stats)
        gate.set()
        assert (await running).status_code == 200
        stats = await setup.stats()
        assert [stats["requests_in_flight"], *(e["in_flight"] for e in stats["engines"])] == [0, 0, 0]

    with_router(scenario, "balanced_prefill_decode", program_settings={"pd_balance_factor": 0.5})


def test_stats_tell_what_hand_offs_moved_and_cost() -> None:
    async def scenario(setup: Setup) -> None:
        for _ in range(2):
            assert (await setup.complete()).status_code == 200
        transfers = (await setup.stats())["transfers"]
        assert transfers == {
            "hand_offs": 2,
            "tokens_sent": 6,
            "bytes_sent": 384,
            "prefill_ms": 3.0,
            "transfer_ms": 0.0,
            "exposed_ms": 0.0,
        }

    with_router(scenario)


@pytest.mark.parametrize("stage", ["prep_recv", "remote_send", "start_generate"])
def test_stopping_ends_what_runs_and_is_nobodys_error(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(setup: Setup) -> None:
        frozen = setup.prefill if stage == "remote_send" else setup.decode
        if stage == "start_generate":
            setup.decode.stream = [STREAM[0], asyncio.Event()]
        running = asyncio.create_task(setup.complete())
        if stage != "start_generate":
            frozen.thawed.clear()
        async with asyncio.timeout(5):
            while stage not in frozen.verbs:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.001)
        await setup.router.end_requests()
        response = await running
        assert response.status_code == 503
        error = response.json()["error"]
        assert (error["code"], error["message"]) == ("shutting_down", "the server is shutting down")
        assert {engine["state"] for engine in (await setup.stats())["engines"]} == {"up"}
        assert (await setup.complete()).status_code == 503
        frozen.thawed.set()
        await setup.router.stop()
        assert "abort" in setup.decode.verbs

    with_router(scenario)
    assert [line for line in caplog.messages if "shutting down" in line or "failed" in line] == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_program_that_clings_to_its_requests_does_not_keep_the_router(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def scenario(setup: Setup) -> None:
        monkeypatch.setattr(router_app, "CLEAN_UP_S", 0.02)
        stop = setup.router._dispatcher.stop
        monkeypatch.setattr(setup.router._dispatcher, "stop", never)
        await setup.router.stop()
        monkeypatch.setattr(setup.router._dispatcher, "stop", stop)

    with_router(scenario)
    assert "does not let go of its requests" in caplog.text


def test_an_engine_that_stops_first_is_nobodys_error_either(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(setup: Setup) -> None:
        error = {
            "message": "the server is shutting down",
            "type": "t",
            "param": None,
            "code": "shutting_down",
        }
        setup.decode.stream = [STREAM[0], event({"error": error})]
        last = [line for line in (await setup.complete(stream=True)).text.splitlines() if line][-1]
        assert '"code":"shutting_down"' in last

    with_router(scenario)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_an_engine_that_is_away_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(setup: Setup) -> None:
        await setup.complete()
        await setup.decode.kill()
        statuses = [(await setup.complete()).status_code for _ in range(8)]
        assert set(statuses[1:]) == {503}

    with_router(scenario, probe_interval_s=60)
    states = [record for record in caplog.records if record.name.endswith("engine_registry")]
    assert [record.levelname for record in states if "is down" in record.getMessage()] == ["WARNING"]
    others = [
        record for record in caplog.records if record.levelno >= logging.WARNING and record not in states
    ]
    assert len(others) <= 1, "the request that found it out"
    refusals = [record for record in caplog.records if record.getMessage().startswith("answered 503")]
    assert {record.levelname for record in refusals} == {"INFO"}
    assert len(refusals) >= 7


PROGRAM = """\
from microserving.program import Program

class Mine(Program):
    async def route(self, request, cluster):
        prefill, decode = cluster.prefill.least_loaded(), cluster.decode.least_loaded()
        end = request.prompt_length - 1
{body}
        async for chunk in decode.start_generate(request, begin=end):
            yield chunk
"""
UNAWAITED = "        decode.prep_recv(request, end=end)\n"
UNSENT = "        await decode.prep_recv(request, end=end)\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "refusal", "status", "code", "level", "logged"),
    [
        (UNAWAITED, (400, "begin 3 is above 0", "begin", "invalid_value"), 500, "internal_error", "ERROR", "begin 3 is above 0 (prep_recv was called without await)"),
        (UNSENT, (400, "end is 9", "end", "invalid_value"), 500, "internal_error", "ERROR", "end is 9"),
        (UNSENT, (409, "r is live", "request_id", "request_id_in_use"), 500, "internal_error", "ERROR", "engine decode-0: r is live"),
        (UNSENT, (409, "the KV has not arrived", "request_id", "lease_invalid"), 502, "transfer_failed", "WARNING", "engine decode-0: the KV has not arrived"),
        (UNSENT, (502, "it broke", None, "engine_unavailable"), 502, "engine_unavailable", "WARNING", "it broke"),
        (UNSENT, (503, "no pages", None, "kv_exhausted"), 503, "kv_exhausted", "INFO", "no pages"),
        (UNSENT, (400, "too long", "max_tokens", "context_length_exceeded"), 400, "context_length_exceeded", "DEBUG", "too long"),
    ],
)  # fmt: skip
def test_what_ends_a_request_is_logged_once_with_the_programs_line(
    body: str,
    refusal: tuple[int, str, str | None, str],
    status: int,
    code: str,
    level: str,
    logged: str,
    stream: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM.format(body=body.rstrip("\n")))
    caplog.set_level(logging.DEBUG, "microserving")

    async def scenario(setup: Setup) -> None:
        answer = dict(zip(("message", "param", "code"), refusal[1:], strict=True)) | {"type": "t"}
        setup.decode.answers["start_generate"] = (refusal[0], {"error": answer}, {})
        response = await setup.complete(stream=stream)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, code)
        if status == 500:
            assert error["message"].startswith("the router program ")
            assert error["param"] is None

    with_router(scenario, str(path))
    own = [r for r in caplog.records if r.name.endswith((".attempt", ".exchange"))]
    assert len(own) == 1
    assert own[0].levelname == level
    assert own[0].getMessage().endswith(f" at {path}:8: {logged}")


def test_a_forgotten_await_is_told_even_when_all_went_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM.format(body=UNAWAITED.rstrip("\n")))

    async def scenario(setup: Setup) -> None:
        assert (await setup.complete()).status_code == 200

    with_router(scenario, str(path))
    assert caplog.messages == [
        f"the router program {path}:3 forgot something (prep_recv was called without await)"
    ]


def test_the_router_tokenises_once_with_the_tokenizer_of_an_engine() -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.complete(prompt="t7 t3 t9")).status_code == 200
        assert setup.decode.bodies[0][1]["prompt"] == [7, 3, 9]
        assert setup.prefill.bodies[0][1]["prompt"] == [7, 3, 9]

    with_router(scenario)


def test_create_app_runs_by_its_lifespan() -> None:
    async def run() -> None:
        async with EngineServer(engine_id="prefill-0") as prefill, EngineServer() as decode:
            app = create_app(config("round_robin", prefill, decode))
            async with app.router.lifespan_context(app):
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
                    models = (await http.get("/v1/models")).json()
        assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("tiny", 512)]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


class TestStartingAProcess:
    def test_a_missing_peer(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            settings = RouterConfig(program="round_robin", decode_peers=(url,), port=0, peer_timeout_s=0.3)
            with pytest.raises(ConfigError, match=f"no answer within 0.3 s from decode engine {url}"):
                run_router(settings)

    def test_a_busy_port(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as busy:
            port = busy.getsockname()[1]
            settings = RouterConfig(program="round_robin", decode_peers=("http://127.0.0.1:1",), port=port)
            with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1 port {port}"):
                run_router(settings)

    def test_a_wrong_program(self) -> None:
        settings = RouterConfig(program="no_such_program", decode_peers=("http://127.0.0.1:1",), port=0)
        with pytest.raises(ProgramError, match="there is no router program 'no_such_program'"):
            run_router(settings)


def test_the_document_describes_the_stats() -> None:
    async def scenario(setup: Setup) -> None:
        document = (await setup.http.get("/openapi.json")).json()
        answer = document["paths"]["/router/stats"]["get"]["responses"]["200"]["content"]
        assert answer["application/json"]["schema"] == {"$ref": "#/components/schemas/RouterStats"}
        assert set(document["components"]["schemas"]["RouterStats"]["properties"]) == set(await setup.stats())
        assert "/v1/chat/completions" in document["paths"]
        assert not [path for path in document["paths"] if path.startswith("/microserving")]

    with_router(scenario)
