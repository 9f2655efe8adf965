"""The list of models is the same whether a client asks an engine or the router in front of it."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from microserving.router import RouterConfig
from microserving.router.app import Router
from microserving.transports.fake import FakeNetwork, FakeTransport
from tests.server.engines import ByteTokenizer, Running, engines, make_node

from .engine_server import EngineServer, tokenizer_document
from .test_admin import Admin

NAMES = ("tiny", "org/tiny modèl/7b", "模型", "tiny:q4?x=1#y%2F")
FIELDS = {"id", "object", "created", "owned_by", "max_model_len"}


@pytest.mark.case("RT-18")
def test_the_router_lists_models_as_its_engines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router serves one model, under all its names: two engines of it are listed once, and an engine of another model,
    which is refused as a member, adds nothing (the case has a router of two models)."""
    monkeypatch.setattr(ByteTokenizer, "to_dict", lambda _: tokenizer_document())
    network = FakeNetwork()
    nodes = [
        make_node(name, FakeTransport(network=network), served_model_name=NAMES)
        for name in ("prefill-0", "decode-0")
    ]
    with engines(*nodes) as (first, second):
        asyncio.run(compare(first, second))


async def compare(first: Running, second: Running) -> None:
    peers = {"prefill_peers": [url(first)], "decode_peers": [url(second)]}
    router = Router(RouterConfig.model_validate({"program": "round_robin"} | peers))
    async with EngineServer(engine_id="other", model="other", model_hash="m2") as other:
        await router.start()
        admin = Admin(router, other, other)
        try:
            await refused(admin, other)
            listed = (await admin.public.get("/v1/models")).json()
            assert [card["id"] for card in listed["data"]] == list(NAMES)
            assert all(card.keys() == FIELDS for card in listed["data"])
            expected = await asyncio.to_thread(first.http.get, "/v1/models")
            assert listed == expected.json()
            for card in listed["data"]:
                await is_found(admin.public, card)
            await is_unknown(admin.public)
        finally:
            await admin.http.aclose()
            await admin.public.aclose()
            await router.stop()


async def refused(admin: Admin, other: EngineServer) -> None:
    await admin.ask("POST", "/admin/engines", json={"url": other.url, "role": "decode"})
    async with asyncio.timeout(10):
        while (state := (await admin.ask("GET", "/admin/engines"))["engines"][2]["state"]) == "unknown":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert state == "refused"


async def is_found(http: httpx.AsyncClient, card: dict[str, Any]) -> None:
    """With its slashes as they are and encoded."""
    for safe in ("", "/"):
        answer = await http.get("/v1/models/" + quote(card["id"], safe=safe))
        assert (answer.status_code, answer.json()) == (200, card)


async def is_unknown(http: httpx.AsyncClient) -> None:
    for name in ("other", "org", "org/tiny", "模", "%00", "a" * 300):
        answer = await http.get("/v1/models/" + quote(name))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), name


def url(engine: Running) -> str:
    return f"http://127.0.0.1:{engine.port}"
