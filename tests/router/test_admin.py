"""The admin routes of a whole router over two scripted engines, and who may use them."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from microserving.errors import ConfigError, StartupError
from microserving.router import RouterConfig
from microserving.router.admin import MAX_BODY_BYTES
from microserving.router.admin_access import AdminAccess, read_key
from microserving.router.admin_listener import admin_served
from microserving.router.app import Router

from .engine_server import EngineServer

GOOD = """\
from microserving.program import *
class Mine(Program):
    share: Fraction = 0.5
    async def route(self, request, cluster):
        async for chunk in cluster.decode.least_loaded().start_generate(request):
            yield chunk
"""
KEY = b"0123456789abcdef"


class Admin:
    """A started router over prefill-0 and decode-0, with clients of both of its apps."""

    def __init__(self, router: Router, prefill: EngineServer, decode: EngineServer) -> None:
        self.router, self.prefill, self.decode = router, prefill, decode
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(router.admin_app), base_url="http://router", timeout=30
        )
        self.public = httpx.AsyncClient(transport=httpx.ASGITransport(router.app), base_url="http://router")

    async def ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = await self.http.request(method, path, **options)
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def refusal(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        answer = await self.http.request(method, path, **options)
        error: dict[str, Any] = answer.json()["error"]
        return answer.status_code, error

    async def deploy(self, **body: Any) -> dict[str, Any]:
        return await self.ask("POST", "/admin/program/deploy", json=body)


def with_admin(scenario: Callable[[Admin], Awaitable[None]], **fields: Any) -> None:
    async def run() -> None:
        async with EngineServer(engine_id="prefill-0") as prefill, EngineServer() as decode:
            peers = {"prefill_peers": [prefill.url], "decode_peers": [decode.url]}
            router = Router(RouterConfig.model_validate({"program": "round_robin"} | peers | fields))
            await router.start()
            admin = Admin(router, prefill, decode)
            try:
                await scenario(admin)
            finally:
                await admin.http.aclose()
                await admin.public.aclose()
                await router.stop()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_deploy_roll_back_and_what_status_tells() -> None:
    async def scenario(admin: Admin) -> None:
        status = await admin.ask("GET", "/admin/program")
        assert (status["in_charge"]["name"], status["in_charge"]["version"]) == ("round_robin", 1)
        status = await admin.deploy(path="/home/me/mine.py", source=GOOD, settings={"share": 0.25})
        now = status["in_charge"]
        assert (now["name"], now["path"], now["settings"]) == ("mine", "/home/me/mine.py", {"share": 0.25})
        assert [(v["version"], v["state"]) for v in status["versions"]] == [(2, "in_charge"), (1, "kept")]
        answer = await admin.public.post("/v1/completions", json={"model": "tiny", "prompt": [5, 6]})
        assert answer.status_code == 200
        assert admin.decode.verbs == ["start_generate"]
        stats = (await admin.public.get("/router/stats")).json()
        assert stats["program"] == {"name": "mine", "settings": {"share": 0.25}, "version": 2, "rollbacks": 0}
        status = await admin.ask("POST", "/admin/program/rollback")
        assert (status["in_charge"]["version"], status["rollbacks"]) == (1, 1)
        assert (status["last_rollback"]["version"], status["last_rollback"]["automatic"]) == (2, False)
        assert await admin.refusal("POST", "/admin/program/rollback") == (
            400,
            {
                "message": "there is no earlier program to go back to",
                "type": "invalid_request_error",
                "param": None,
                "code": "program_refused",
            },
        )

    with_admin(scenario)


def test_deploy_by_path_and_by_name(tmp_path: Path) -> None:
    path = tmp_path / "there.py"
    path.write_text(GOOD)

    async def scenario(admin: Admin) -> None:
        assert (await admin.deploy(path=str(path)))["in_charge"]["path"] == str(path)
        assert (await admin.deploy(path="prefill_decode"))["in_charge"]["name"] == "prefill_decode"
        programs = (await admin.ask("GET", "/admin/programs"))["programs"]
        assert {"name": "round_robin", "summary": "Data parallel: every engine serves whole requests, one after the other."} in programs  # fmt: skip

    with_admin(scenario)


def test_wrong_programs_and_wrong_bodies() -> None:
    broken = GOOD.replace("cluster.decode", "cluster.nowhere")
    cases: list[tuple[dict[str, Any], str | None, str]] = [
        ({"path": "/m.py", "source": broken}, None, "/m.py:5: AttributeError: 'FakeCluster' object has no"),
        ({"path": "/m.py", "source": GOOD, "settings": {"share": 7}}, "share", "/m.py:3: Mine: setting 'share' is"),
        ({"path": "/m.py", "source": "x" * 2**20 + "x"}, None, "/m.py: a router program may have at most 1048576"),
        ({"path": "no_such_program"}, None, "there is no router program 'no_such_program'"),
        ({}, "path", "path: Field required"),
        ({"path": "/m\n.py"}, None, "path must be printable"),
        ({"path": "/m.py", "source": 7}, "source", "source: Input should be a valid string"),
        ({"path": "/m.py", "settings": {"a": [1]}}, None, ""),
        ({"path": "/m.py", "sources": GOOD}, "sources", "unknown field 'sources'"),
    ]  # fmt: skip

    async def scenario(admin: Admin) -> None:
        for body, param, message in cases:
            status, error = await admin.refusal("POST", "/admin/program/deploy", json=body)
            assert (status, error["message"][: len(message)]) == (400, message), error
            if param is not None:
                assert error["param"] == param
        status, error = await admin.refusal(
            "POST", "/admin/program/deploy", content=b"x" * (MAX_BODY_BYTES + 1)
        )
        assert (status, error["code"]) == (413, "payload_too_large")
        status, error = await admin.refusal("POST", "/admin/program/deploy", content=b"no json")
        assert status == 400
        assert (await admin.refusal("GET", "/admin/nothing"))[0] == 404
        assert (await admin.refusal("GET", "/admin/program/deploy"))[0] == 405
        assert (await admin.ask("GET", "/admin/program"))["in_charge"]["version"] == 1
        for path in ("/admin/program", "/admin/engines"):
            assert (await admin.public.get(path)).status_code == 404

    with_admin(scenario)


def shown(engines: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(e["id"], e["role"], e["state"], e["in_flight"]) for e in engines["engines"]]


async def until_up(admin: Admin, count: int) -> None:
    async with asyncio.timeout(10):
        while [e[2] for e in shown(await admin.ask("GET", "/admin/engines"))] != ["up"] * count:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


@pytest.mark.case("RT-14")
def test_engines_come_change_and_go() -> None:
    async def scenario(admin: Admin) -> None:
        both = [("prefill-0", "prefill", "up", 0), ("decode-0", "decode", "up", 0)]
        assert shown(await admin.ask("GET", "/admin/engines")) == both
        async with EngineServer(engine_id="decode-1") as third:
            added = await admin.ask("POST", "/admin/engines", json={"url": third.url, "role": "decode"})
            assert added["engines"][2]["url"] == third.url
            await until_up(admin, 3)
            engines = await admin.ask("PATCH", "/admin/engines/decode-1", json={"role": "hybrid"})
            assert shown(engines)[2] == ("decode-1", "hybrid", "up", 0)
            engines = await admin.ask("POST", "/admin/engines/decode-1/drain")
            assert shown(engines)[2] == ("decode-1", "hybrid", "drained", 0)
            engines = await admin.ask("POST", "/admin/engines/decode-1/undrain")
            assert shown(engines)[2][2] == "up"
            url = third.url.replace(":", "%3A").replace("/", "%2F")
            assert shown(await admin.ask("DELETE", f"/admin/engines/{url}")) == both
        refusals = [
            await admin.refusal("POST", "/admin/engines", json={"url": admin.decode.url}),
            await admin.refusal("POST", "/admin/engines", json={"url": "ftp://x"}),
            await admin.refusal("POST", "/admin/engines", json={"url": "h:1", "role": "boss"}),
            await admin.refusal("DELETE", "/admin/engines/decode-7"),
            await admin.refusal("POST", "/admin/engines/decode-7/drain"),
            await admin.refusal("PATCH", "/admin/engines/decode-7", json={"role": "decode"}),
            await admin.refusal("PATCH", "/admin/engines/decode-0", json={}),
            await admin.refusal("DELETE", "/admin/engines/decode-0?drain=perhaps"),
        ]
        assert [status for status, _ in refusals] == [400] * len(refusals)
        params = [error["param"] for _, error in refusals]
        assert params == ["url", "url", "role", "engine", "engine", "engine", "role", "drain"]

    with_admin(scenario)


async def ok_app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize(
    ("key", "headers", "status"),
    [
        (KEY, {}, 401),
        (KEY, {"authorization": "Bearer 0123456789abcdeF"}, 401),
        (KEY, {"authorization": "Bearer 0123456789abcde"}, 401),
        (KEY, {"authorization": "Basic 0123456789abcdef"}, 401),
        (KEY, {"authorization": "Bearer \xe9"}, 401),
        (KEY, {"authorization": "bearer 0123456789abcdef"}, 200),
        (KEY, {"authorization": "Bearer 0123456789abcdef", "host": "far.example", "origin": "http://x"}, 200),
        (None, {"host": "127.0.0.1:8"}, 200),
        (None, {"host": "[::1]:8"}, 200),
        (None, {"host": "localhost"}, 200),
        (None, {"host": "127.0.0.1:8", "origin": "http://evil.example"}, 403),
        (None, {"host": "127.0.0.1:8", "origin": "null"}, 403),
        (None, {"host": "evil.example:8"}, 403),
        (None, {"host": "127.0.0.1.evil.example"}, 403),
        (None, {"host": "127.0.0.1@evil.example"}, 403),
    ],
)
def test_who_may(key: bytes | None, headers: dict[str, str], status: int) -> None:
    async def run() -> None:
        app = AdminAccess(ok_app, key, any_host=False)
        transport = httpx.ASGITransport(app)
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            answer = await http.post("/admin/program/deploy", headers=raw)
        assert answer.status_code == status
        if status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"

    asyncio.run(run())


def test_keys_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    assert read_key(path) == KEY
    path.write_bytes(KEY[1:])
    with pytest.raises(ConfigError, match="is 15 bytes; it needs at least 16"):
        read_key(path)
    with pytest.raises(ConfigError, match="cannot read the admin key file /no/key: No such file"):
        read_key(Path("/no/key"))


def config(**fields: Any) -> RouterConfig:
    return RouterConfig.model_validate({"program": "p", "decode_peers": "h:1"} | fields)


@asynccontextmanager
async def served(**fields: Any) -> AsyncIterator[None]:
    async with admin_served(ok_app, config(**fields)):
        yield


def test_the_socket_is_for_this_user_and_goes_with_the_router(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"

    async def run() -> None:
        async with served(admin_socket=path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
                assert (await http.get("/")).status_code == 200
                assert (await http.get("/", headers={"origin": "http://x"})).status_code == 403
            with pytest.raises(StartupError, match=r"a router listens on the admin socket .* already"):
                async with served(admin_socket=path):
                    raise AssertionError
        assert not path.exists()

    asyncio.run(run())


def test_the_socket_of_a_router_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def run() -> None:
        async with served(admin_socket=path):
            assert path.is_socket()

    asyncio.run(run())


def test_sockets_that_cannot_be(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("mine")
    long = tmp_path / ("x" * 108)

    async def run() -> None:
        for path, message in [
            (taken, "cannot make the admin socket .*: Address already in use"),
            (long, "longer than 107 bytes"),
            (Path("/no/where/s"), "cannot make the admin socket /no/where/s: No such file"),
        ]:
            with pytest.raises(StartupError, match=message):
                async with served(admin_socket=path):
                    raise AssertionError

    asyncio.run(run())
    assert taken.read_text() == "mine"


def test_a_port_with_a_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(KEY)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = len(os.listdir("/proc/self/fd"))

    async def run() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(served(admin_port=port, admin_key_file=str(key)))
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}"))
            assert (await http.get("/")).status_code == 401
            answer = await http.get("/", headers={"authorization": f"Bearer {KEY.decode()}"})
            assert answer.status_code == 200
            with pytest.raises(StartupError, match=r"cannot listen on 127\.0\.0\.1 port"):
                async with served(admin_port=port):
                    raise AssertionError

    asyncio.run(run())
    assert len(os.listdir("/proc/self/fd")) == before


def test_beyond_this_machine_only_with_a_key() -> None:
    with pytest.raises(ValueError, match=r"the admin routes listen on 0\.0\.0\.0 only with admin_key_file"):
        config(admin_bind="0.0.0.0", admin_port=9)
    assert config(admin_bind="0.0.0.0").admin_port == 0
    assert config(admin_bind="0.0.0.0", admin_port=9, admin_key_file="/k").admin_key_file == Path("/k")
