"""What the router's front shows and to whom: stats, metrics, keys; and how it stops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from microserving.errors import ConfigError
from microserving.router.app import Router

from .engine_server import DONE, STREAM, USAGE, EngineServer, choice
from .test_app import Setup, config, with_router

KEY = "sk-0123456789abcdef"
ADMIN = "admin-0123456789abcdef"


def key_file(folder: Path, key: str = KEY) -> Path:
    path = folder / f"key-{key[:5]}"
    path.write_text(key + "\n")
    return path


def test_stats_hide_addresses_unless_an_admin_asks(tmp_path: Path) -> None:
    async def scenario(setup: Setup) -> None:
        plain = await setup.http.get("/router/stats")
        assert "127.0.0.1" not in plain.text
        assert [engine["address"] for engine in plain.json()["engines"]] == [None, None]
        assert plain.json()["admission"] | {"load": 0} == {
            "level": "low",
            "load": 0,
            "in_flight": 0,
            "waiting": 0,
            "queued": 0,
            "refused": 0,
        }
        for headers in ({}, {"x-admin-key": "wrong"}, {"authorization": f"Bearer {ADMIN}"}):
            refused = await setup.http.get("/router/stats?addresses=1", headers=headers)
            assert refused.status_code == 401
            assert "127.0.0.1" not in refused.text
        shown = await setup.http.get("/router/stats?addresses=1", headers={"x-admin-key": ADMIN})
        assert [engine["address"] for engine in shown.json()["engines"]] == [
            setup.prefill.url,
            setup.decode.url,
        ]

    with_router(scenario, admin_key_file=key_file(tmp_path, ADMIN))


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.case("SC-24")
@pytest.mark.case("MT-03")
def test_metrics_count_and_hold_nothing_that_a_client_sent() -> None:
    async def scenario(setup: Setup) -> None:
        await setup.complete()
        await setup.http.post(
            "/v1/completions", json={"model": "other", "prompt": [5], "max_tokens": 2, "n": 2}
        )
        before = samples((await setup.http.get("/metrics")).text)
        for number in range(30):
            secret = f"tenant-{number}@example"
            headers = {"x-request-id": secret, "authorization": f"Bearer {secret}", "user-agent": secret}
            body = {
                "model": secret if number % 2 else "tiny",
                "user": secret,
                "prompt": [5, 6],
                "max_tokens": 2,
                "n": 1 + number % 4 // 2,
            }
            await setup.http.post("/v1/completions", json=body, headers=headers)
        answer = await setup.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "tenant" not in answer.text
        assert "127.0.0.1" not in answer.text
        after = samples(answer.text)
        assert set(after) == set(before)
        ok, unknown = (frozenset({("outcome", how)}) for how in ("ok", "model_not_found"))
        requests, generations = (f"microserving_router_{what}_total" for what in ("requests", "generations"))
        assert (before[requests, ok], after[requests, ok]) == (1, 16)  # 15 with the right model
        assert (before[requests, unknown], after[requests, unknown]) == (1, 16)
        # One choice each for 0, 4 .. 28, two for 2, 6 .. 26.
        assert (before[generations, ok], after[generations, ok]) == (1, 1 + 8 + 2 * 7)
        assert after["microserving_router_output_tokens_total", frozenset()] == 2 * 23
        for engine in ("prefill-0", "decode-0"):
            labels = frozenset({("engine", engine), ("role", engine[:-2])})
            assert after["microserving_router_engine_up", labels] == 1
            assert after["microserving_router_engine_requests", labels] == 0

    with_router(scenario)


def test_a_stopping_router_lets_streams_finish_and_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(setup: Setup) -> None:
        go_on = asyncio.Event()
        setup.decode.stream = [STREAM[0], go_on, choice("lo", [2], "stop"), USAGE, DONE]
        running = asyncio.create_task(setup.complete(stream=True))
        async with asyncio.timeout(5):
            while (await setup.stats())["states"].get("decoding") != 1:  # noqa: ASYNC110 - asks over HTTP
                await asyncio.sleep(0.01)
        stopping = asyncio.create_task(setup.router.wind_down())
        await asyncio.sleep(0)
        assert (await setup.http.get("/ready")).status_code == 503
        assert (await setup.http.get("/health")).status_code == 200
        assert (await setup.complete()).status_code == 503
        assert not stopping.done()
        go_on.set()
        assert (await running).text.endswith("data: [DONE]\n\n")
        await stopping
        assert "waiting at most 30 s for running requests to finish" in caplog.text
        assert "(told again: not at all): 1" in caplog.text

    with_router(scenario)


def test_what_takes_too_long_to_finish_ends_with_an_error() -> None:
    async def scenario(setup: Setup) -> None:
        setup.decode.stream = [STREAM[0], asyncio.Event()]
        running = asyncio.create_task(setup.complete(stream=True))
        async with asyncio.timeout(5):
            while (await setup.stats())["states"].get("decoding") != 1:  # noqa: ASYNC110 - asks over HTTP
                await asyncio.sleep(0.01)
        await setup.router.wind_down()
        assert '"code":"shutting_down"' in (await running).text

    with_router(scenario, shutdown_timeout_s=0.1)


class Guarded(EngineServer):
    """Wants a key, as an engine with --api-key-file does."""

    def _scripted(self, name: str) -> Any:
        if self.headers.get("authorization") != f"Bearer {KEY}":
            body = {"error": {"message": "an API key is needed", "code": "invalid_api_key"}}
            self.answers = dict.fromkeys(
                ("/ready", "/microserving/info", "/microserving/load", "prep_recv"), (401, body, {})
            )
        else:
            self.answers = {}
        return super()._scripted(name)

    async def _arrived(self, request: Any) -> None:
        self.headers = request.headers
        await super()._arrived(request)


@pytest.mark.case("RT-08")
@pytest.mark.parametrize("key", [KEY, None, "sk-another-one-123456"])
def test_engines_that_want_a_key(tmp_path: Path, key: str | None) -> None:
    async def run() -> None:
        async with Guarded(engine_id="prefill-0") as prefill, Guarded() as decode:
            fields = {} if key is None else {"engine_api_key_file": key_file(tmp_path, key)}
            router = Router(config("prefill_decode", prefill, decode, **(fields | {"peer_timeout_s": 0.5})))
            if key == KEY:
                await router.start()
                setup = Setup(prefill, decode, router)
                assert (await setup.complete()).json()["choices"][0]["text"] == "Hello"
                await setup.http.aclose()
            else:
                with pytest.raises(ConfigError, match="an API key is needed"):
                    await router.start()
            await router.stop()

    asyncio.run(run())


def test_keys_of_clients_guard_every_route_of_the_router(tmp_path: Path) -> None:
    async def scenario(setup: Setup) -> None:
        for path in ("/router/stats", "/metrics", "/v1/models", "/docs"):
            assert (await setup.http.get(path)).status_code == 401
        assert (await setup.complete()).status_code == 401
        assert not setup.decode.verbs
        setup.http.headers["authorization"] = f"Bearer {KEY}"
        assert (await setup.http.get("/metrics")).status_code == 200
        assert (await setup.complete()).status_code == 200

    with_router(scenario, api_key_file=key_file(tmp_path))
