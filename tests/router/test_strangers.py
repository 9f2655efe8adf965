"""What a stranger at the public port can make the router do: call nobody, and change nothing about who its engines are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from microserving.protocol.microserving import PrepRecvRequest, RemoteSendRequest, StartGenerateRequest
from microserving.protocol.openai import CompletionRequest
from microserving.router.admin_access import AdminAccess

from .engine_server import EngineServer
from .test_admin import KEY, Admin, until_up, with_admin
from .test_app import Setup, with_router

OF_THE_VERBS = sorted(
    set().union(
        *(set(body.model_fields) for body in (PrepRecvRequest, RemoteSendRequest, StartGenerateRequest))
    )
    - set(CompletionRequest.model_fields)
)
OF_OTHERS = [
    *(
        "kv_append_metadata",
        "dst_group_offset",
        "kv_window_end",
        "peer",
        "peers",
        "engine",
        "engine_id",
        "url",
    ),
    *(
        "host",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "kv_transfer_params",
        "disagg_prefill_dp_rank",
    ),
    *("remote_host", "remote_port", "prefill_host", "decode_host", "do_remote_prefill", "kv_window_begin"),
]
HEADERS = [
    *(
        "x-prefill-host",
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x-decode-host",
        "x-engine",
        "x-engine-id",
    ),
    *(
        "x-kv-addr-info",
        "x-bootstrap-host",
        "x-forwarded-host",
        "x-forwarded-for",
        "x-original-url",
        "x-rewrite-url",
    ),
    *("x-gateway-destination-endpoint", "x-data-parallel-rank", "forwarded", "referer", "origin", "location"),
]


@asynccontextmanager
async def canary() -> AsyncIterator[tuple[str, list[str]]]:
    """(an address, who connected to it)."""
    callers: list[str] = []

    async def met(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(str(writer.get_extra_info("peername")))
        writer.close()

    server = await asyncio.start_server(met, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", callers
    finally:
        server.close()


def sent_to(engine: EngineServer) -> str:
    return json.dumps([engine.bodies, engine.heads])


def test_the_list_of_internal_fields_is_not_empty() -> None:
    assert {"kv_addr_info", "recv_rank", "begin", "end", "resume_output_ids"} <= set(OF_THE_VERBS)


@pytest.mark.case("SC-05")
def test_no_field_and_no_header_says_who_is_called() -> None:
    async def scenario(setup: Setup) -> None:
        async with canary() as (url, callers):
            where = url.removeprefix("http://")
            for name in [*OF_THE_VERBS, *OF_OTHERS]:
                for value in (url, {"remote_host": where, "url": url}):
                    for path, prompt in (
                        ("/v1/completions", {"prompt": [5, 6, 7, 8]}),
                        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "t5"}]}),
                        ("/v1/responses", {"input": "t5"}),
                    ):
                        await ask(setup, path, {"model": "tiny", **prompt, name: value}, name)
            for name in HEADERS:
                answer = await setup.http.post(
                    "/v1/completions", json={"model": "tiny", "prompt": [5, 6]}, headers={name: where}
                )
                assert answer.status_code == 200
            assert callers == []
            assert where not in sent_to(setup.prefill) + sent_to(setup.decode)

    with_router(scenario)


async def ask(setup: Setup, path: str, body: dict[str, Any], name: str) -> None:
    """It is ignored and named, or refused."""
    answer = await setup.http.post(path, json=body)
    if answer.status_code == 200:
        assert name in answer.headers.get("x-ignored-fields", "").split(", "), name
    else:
        assert answer.status_code == 400, (name, answer.text)


@pytest.mark.case("SC-05")
def test_no_document_is_fetched_for_a_request() -> None:
    async def scenario(setup: Setup) -> None:
        async with canary() as (url, callers):
            image = {"type": "image_url", "image_url": {"url": url}}
            schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": f"{url}/s"}}}
            bodies: list[dict[str, Any]] = [
                {"messages": [{"role": "user", "content": [image]}]},
                {"messages": [{"role": "user", "content": "t5"}], "response_format": schema},
                {"messages": [{"role": "user", "content": "t5"}], "chat_template": url},
                {
                    "messages": [{"role": "user", "content": "t5"}],
                    "tools": [{"type": "mcp", "server_url": url}],
                },
            ]
            for body in bodies:
                answer = await setup.http.post("/v1/chat/completions", json={"model": "tiny", **body})
                assert answer.status_code == 400, answer.text
            assert callers == []

    with_router(scenario)


CHANGES: list[tuple[str, str, Any]] = [
    ("POST", "/admin/engines", {"url": "http://127.0.0.1:9", "role": "decode"}),
    ("PUT", "/admin/engines", {"url": "http://127.0.0.1:9", "role": "decode"}),
    ("PUT", "/admin/engines/decode-0", {"url": "http://127.0.0.1:9"}),
    ("PATCH", "/admin/engines/decode-0", {"role": "prefill"}),
    ("POST", "/admin/engines/decode-0/drain", {}),
    ("DELETE", "/admin/engines/decode-0?drain=false", None),
    ("POST", "/admin/program/deploy", {"path": "round_robin"}),
    ("GET", "/admin/engines", None),
]


ASKING = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"}
"""All that the public port takes a body for."""


async def refused_to_all(http: httpx.AsyncClient, statuses: set[int]) -> None:
    for method, path, body in CHANGES:
        answer = await http.request(method, path, json=body)
        assert answer.status_code in statuses, (method, path, answer.text)


async def is_served(admin: Admin) -> None:
    """By the two engines that there are, in turn."""
    for _ in range(2):
        answer = await admin.public.post("/v1/completions", json={"model": "tiny", "prompt": [5, 6]})
        assert answer.status_code == 200
    engines = (await admin.ask("GET", "/admin/engines"))["engines"]
    members = [(admin.prefill.url, "up"), (admin.decode.url, "up")]
    assert [(e["url"], e["state"]) for e in engines][:2] == members


@pytest.mark.case("SC-07")
@pytest.mark.case("SC-03")
def test_no_stranger_adds_replaces_or_removes_an_engine() -> None:
    """At the public port there is no such route (and none by which an engine registers itself or reports its state); at
    the admin port they need the key, at one without a key they are not for web pages."""

    async def scenario(admin: Admin) -> None:
        await refused_to_all(admin.public, {404})
        routes = {
            (method, path)
            for path, methods in admin.router.app.openapi()["paths"].items()
            for method in methods
            if method != "get"
        }
        assert {path for _, path in routes} == ASKING
        for key, headers, status in (
            (KEY, {}, 401),
            (KEY, {"authorization": "Bearer 0123456789abcdeg"}, 401),
            (None, {"origin": "http://evil.example"}, 403),
        ):
            guarded = httpx.ASGITransport(AdminAccess(admin.router.admin_app, key, any_host=False))
            async with httpx.AsyncClient(
                transport=guarded, base_url="http://127.0.0.1", headers=headers
            ) as http:
                await refused_to_all(http, {status})
        await is_served(admin)
        assert len((await admin.ask("GET", "/admin/engines"))["engines"]) == 2

    with_admin(scenario)


@pytest.mark.case("SC-07")
def test_an_id_stays_with_the_engine_that_has_it(caplog: pytest.LogCaptureFixture) -> None:
    """Even whom the operator adds does not take over the id of an engine that is up: it gets no request."""

    async def scenario(admin: Admin) -> None:
        async with EngineServer(engine_id="decode-0", epoch="e2") as other:
            await admin.ask("POST", "/admin/engines", json={"url": other.url, "role": "decode"})
            async with asyncio.timeout(10):
                while (state := await third(admin))["state"] == "unknown":  # noqa: ASYNC110 - asks over HTTP
                    await asyncio.sleep(0.01)
            assert state["state"] == "refused"
            assert "its node id 'decode-0' is that of decode engine" in state["reason"]
            assert f"decode engine {other.url} is refused: its node id" in caplog.text
            await is_served(admin)
            await is_served(admin)
            assert other.verbs == []
            await admin.ask("DELETE", f"/admin/engines/{other.url}")
            await until_up(admin, 2)

    with_admin(scenario)


async def third(admin: Admin) -> dict[str, Any]:
    engines: list[dict[str, Any]] = (await admin.ask("GET", "/admin/engines"))["engines"]
    return engines[2]
