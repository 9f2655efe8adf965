"""The limits of an engine's front come from its configuration."""

from __future__ import annotations

import asyncio

import httpx

from microserving.engine.config import EngineConfig
from microserving.front import create_front
from microserving.server.node import front_settings
from microserving.tokenizer import Tokenizer


class Nothing:
    """A backend that has no model."""

    model = None
    tokenizer: Tokenizer | None = None
    ready = False

    async def refresh(self) -> None: ...

    def generate(self, request: object) -> object:
        raise AssertionError("nothing is generated")


def ask(config: EngineConfig, bodies: list[dict[str, str]]) -> list[httpx.Response]:
    async def send() -> list[httpx.Response]:
        app = create_front(Nothing(), front_settings(config))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.post("/v1/completions", json=body) for body in bodies]

    return asyncio.run(send())


def test_a_body_over_the_limit() -> None:
    config = EngineConfig(max_body_bytes=200)
    small, large = ask(config, [{"prompt": "a"}, {"prompt": "a" * 200}])
    assert small.status_code == 503  # it got as far as asking for an engine
    assert (large.status_code, large.json()["error"]["code"]) == (413, "payload_too_large")


def test_more_requests_than_a_client_may_send() -> None:
    answers = ask(EngineConfig(requests_per_minute=2), [{"prompt": "a"}] * 3)
    assert [answer.status_code for answer in answers] == [503, 503, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert answers[2].json()["error"]["type"] == "rate_limit_error"
