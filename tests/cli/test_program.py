"""`microserving program` and `microserving engines`: what they say, ask of a router, and answer."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from microserving.cluster.runtime_dir import ADMIN_SOCKET, admin_sockets, runtime_dir, write_card
from microserving.front import ApiKeys, FrontSettings, create_front

from .conftest import Ran

GOOD = """\
from microserving.program import *
class Mine(Program):
    share: Fraction = 0.5
    async def route(self, request, cluster):
        async for chunk in cluster.decode.least_loaded().start_generate(request):
            yield chunk
"""
VERSION = {
    "version": 2,
    "name": "mine",
    "path": "/mine.py",
    "settings": {"share": 0.25, "word": "x"},
    "state": "in_charge",
    "since": 0.0,
    "attempts": 1,
    "ok": 20,
    "failed": 3,
}
STATUS = {
    "in_charge": VERSION,
    "versions": [VERSION, {**VERSION, "version": 1, "name": "round_robin", "settings": {}, "state": "kept"}],
    "deployments": 1,
    "rollbacks": 1,
    "refused": 0,
    "last_rollback": {
        "version": 3,
        "name": "bad",
        "back_to": 2,
        "reason": "3 of its first 3 attempts failed",
        "automatic": True,
        "at": 0.0,
    },
}
ENGINES = {
    "engines": [
        {
            "id": "prefill-0",
            "url": "http://h:1",
            "role": "prefill",
            "state": "up",
            "reason": "",
            "in_flight": 2,
        },
        {
            "id": None,
            "url": "http://h:2",
            "role": "decode",
            "state": "down",
            "reason": "gone",
            "in_flight": 0,
        },
    ]
}


class Router(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers every admin route with ``answer``, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.answer: tuple[int, Any] = (200, STATUS)
        super().__init__(str(path), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        connection, _ = super().get_request()
        return connection, ("local", 0)


class _Handler(BaseHTTPRequestHandler):
    server: Router

    def handle_one(self) -> None:
        length = int(self.headers.get("content-length", "0"))
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.asked.append((self.command, self.path, body, self.headers.get("authorization")))
        status, answer = self.server.answer
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = do_PATCH = handle_one  # noqa: N815 - the base class looks for these names

    def log_message(self, *_: Any) -> None:
        """Not on stderr."""


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    with Router(tmp_path / "a.sock") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def admin(run: Any, router: Router) -> Any:
    """A command with the router's address."""
    return lambda *arguments: run(*arguments, "--admin", str(router.server_address))


def test_check(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    ran = run("program", "check", str(path), "--set", "share=0.25")
    assert (ran.status, ran.out, ran.err) == (0, f"{path}: ok (Mine; share=0.25)\n", "")
    ran = run("program", "check", str(path), "--json")
    assert json.loads(ran.out) == {"program": str(path), "class": "Mine", "settings": {"share": 0.5}}
    path.write_text(GOOD.replace("cluster.decode", "cluster.prefill"))
    assert run("program", "check", str(path)).status == 0
    ran = run("program", "check", str(path), "--prefill", "0")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"microserving: error: {path}:5: NoEngine: no prefill engine is reachable")
    path.write_text(GOOD.replace("async for", "for"))
    ran = run("program", "check", str(path))
    assert (ran.status, ran.err.count("\n")) == (1, 1)
    assert ran.err.startswith(f"microserving: error: {path}:5: TypeError: ")


def test_check_with_faults(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    ran = run("program", "check", str(path), "--faults", "--prefill", "0", "--set", "share=0.25")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.startswith("mine: sound (")
    path.write_text(GOOD.replace("yield chunk", "yield chunk; self.share += 1 if chunk.finish_reason else 0"))
    assert run("program", "check", str(path), "--faults").status == 0  # a total is no counter
    path.write_text(
        GOOD.replace("        async for", "        self.busy = 1\n        async for")
        + "        self.busy = 0\n"
    )
    ran = run("program", "check", str(path), "--faults", "--json")
    report = json.loads(ran.out)
    assert (ran.status, report["ok"]) == (1, False)
    assert {finding["kind"] for finding in report["findings"]} == {"counter"}
    path.write_text(GOOD.replace("async for", "for"))
    assert run("program", "check", str(path), "--faults").err.startswith(
        f"microserving: error: {path}:5: TypeError: "
    )


def test_list_and_show(run: Any) -> None:
    ran = run("program", "list")
    assert "round_robin              Data parallel: every engine serves whole requests" in ran.out
    assert {"round_robin", "prefill_decode"} <= {entry["name"] for entry in json.loads(run("program", "list", "--json").out)}  # fmt: skip
    ran = run("program", "show", "round_robin")
    assert ran.out == (Path(__file__).parents[2] / "router_programs" / "round_robin.py").read_text()
    assert run("program", "show", "square_robin").err.startswith(
        "microserving: error: there is no router program 'square_robin': give a file, or one of "
    )


def test_deploy_sends_the_text(admin: Any, router: Router, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    ran = admin("program", "deploy", str(path), "--set", "share=0.25")
    assert (ran.status, ran.out) == (0, "version 2 is in charge: mine (share=0.25, word=x)\n")
    admin("program", "deploy", "round_robin")
    assert router.asked == [
        (
            "POST",
            "/admin/program/deploy",
            {"path": str(path), "source": GOOD, "settings": {"share": 0.25}},
            None,
        ),
        ("POST", "/admin/program/deploy", {"path": "round_robin", "settings": {}}, None),
    ]


def test_a_refusal_is_one_line(admin: Any, router: Router) -> None:
    error = {"message": "/mine.py:7: a fault", "type": "t", "param": None, "code": "program_refused"}
    router.answer = (400, {"error": error})
    ran = admin("program", "deploy", "round_robin")
    assert (ran.status, ran.err) == (1, "microserving: error: /mine.py:7: a fault\n")


def test_a_text_that_is_no_utf_8(admin: Any, router: Router, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    ran = admin("program", "deploy", str(path))
    assert (ran.status, ran.err) == (1, f"microserving: error: {path}:2: not a text in UTF-8\n")
    assert router.asked == []


def test_status_and_rollback(admin: Any, router: Router) -> None:
    ran = admin("program", "status")
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    assert lines[0] == "VERSION PROGRAM STATE SINCE RUNNING OK FAILED SETTINGS"
    assert lines[1].startswith("3 bad rolled back ")  # the router has forgotten it
    assert lines[1].endswith(" 0 - - -")
    assert lines[2].startswith("2 mine in charge ")
    assert lines[2].endswith(" 1 20 3 share=0.25, word=x")
    assert lines[3].endswith(" -")
    assert lines[-1].startswith("version 3 (bad) was rolled back automatically at ")
    assert lines[-1].endswith(": 3 of its first 3 attempts failed")
    assert json.loads(admin("program", "status", "--json").out) == STATUS
    by_hand = STATUS["last_rollback"] | {"automatic": False, "reason": "asked for"}
    router.answer = (200, STATUS | {"last_rollback": by_hand})
    assert re.search(r"rolled back by hand at [-:\d ]+\n$", admin("program", "status").out)
    router.answer = (200, STATUS)
    assert admin("program", "rollback").out == "version 2 is in charge: mine (share=0.25, word=x)\n"
    assert json.loads(admin("program", "rollback", "--json").out) == STATUS
    assert [asked[:2] for asked in router.asked] == [
        *[("GET", "/admin/program")] * 3,
        ("POST", "/admin/program/rollback"),
        ("POST", "/admin/program/rollback"),
    ]


def test_a_version_that_was_rolled_back_and_still_runs_says_so(admin: Any, router: Router) -> None:
    bad = VERSION | {"version": 3, "name": "bad", "state": "draining", "attempts": 4}
    router.answer = (200, STATUS | {"versions": [bad, VERSION]})
    lines = [" ".join(line.split()) for line in admin("program", "status").out.splitlines()]
    assert lines[1].startswith("3 bad rolled back ")
    assert lines[1].endswith(" 4 20 3 share=0.25, word=x")
    assert lines[2].startswith("2 mine in charge ")


def test_engines(admin: Any, router: Router) -> None:
    router.answer = (200, ENGINES)
    assert admin("engines", "list").out.splitlines() == [
        "ENGINE     ROLE     STATE  REQUESTS  URL         REASON",
        "prefill-0  prefill  up     2         http://h:1  -",
        "-          decode   down   0         http://h:2  gone",
    ]
    assert json.loads(admin("engines", "list", "--json").out) == ENGINES
    for arguments in (
        ("add", "h:3", "--role", "decode"),
        ("remove", "prefill-0"),
        ("remove", "http://h:2", "--now"),
        ("drain", "prefill-0"),
        ("undrain", "prefill-0"),
        ("set-role", "prefill-0", "hybrid"),
    ):
        assert admin("engines", *arguments).status == 0
    assert [asked[:3] for asked in router.asked[2:]] == [
        ("POST", "/admin/engines", {"url": "h:3", "role": "decode"}),
        ("DELETE", "/admin/engines/prefill-0?drain=true", None),
        ("DELETE", "/admin/engines/http%3A%2F%2Fh%3A2?drain=false", None),
        ("POST", "/admin/engines/prefill-0/drain", None),
        ("POST", "/admin/engines/prefill-0/undrain", None),
        ("PATCH", "/admin/engines/prefill-0", {"role": "hybrid"}),
    ]
    assert admin("engines", "set-role", "prefill-0", "boss").status == 2


def test_the_key_is_sent(admin: Any, router: Router, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    admin("program", "status", "--admin-key-file", str(key))
    assert router.asked[0][3] == "Bearer 0123456789abcdef"
    ran = admin("program", "status", "--admin-key-file", "/no/key")
    assert ran.err.startswith("microserving: error: cannot read the admin key file /no/key")


@pytest.mark.parametrize("keys", [None, ApiKeys([("ann", "0123456789abcdef")])])
def test_the_routes_for_clients_are_no_admin_routes(admin: Any, router: Router, keys: ApiKeys | None) -> None:
    async def asked() -> httpx.Response:
        app = create_front(cast(Any, None), FrontSettings(api_keys=keys), title="t")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://r") as client:
            return await client.get("/admin/program")

    answer = asyncio.run(asked())
    router.answer = (answer.status_code, answer.content)
    for command in (("program", "status"), ("engines", "list")):
        ran = admin(*command)
        assert ran.status == 1
        assert "start the router with --admin-port or --admin-socket" in ran.err


def test_what_the_admin_routes_refuse_is_told_as_it_is(admin: Any, router: Router) -> None:
    for status, message in ((401, "the admin key is wrong"), (404, "there is no such admin route")):
        router.answer = (status, {"error": {"message": message, "code": "c", "type": "t"}})
        assert admin("program", "status").err == f"microserving: error: {message}\n"


@pytest.mark.parametrize("answer", [(200, b"hello"), (502, b"<html>"), (200, b"[]")])
def test_somebody_else_answers(admin: Any, router: Router, answer: tuple[int, bytes]) -> None:
    router.answer = answer
    ran = admin("program", "status")
    assert ran.status == 1
    assert f"is no router's admin address (status {answer[0]})" in ran.err


@pytest.mark.parametrize("address", ["/no/such.sock", "http://127.0.0.1:1", "http://["])
def test_nobody_answers(run: Any, address: str) -> None:
    ran = run("program", "status", "--admin", address)
    assert (ran.status, ran.err.count("\n")) == (1, 1)
    assert ran.err.startswith(f"microserving: error: no router answers at {address}: ")


def test_the_cluster_that_runs_here_is_found(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ran: Ran = run("program", "status")
    assert "no cluster runs here (`microserving up` starts one); --admin names a router" in ran.err
    left = tmp_path / "microserving-up-left"
    left.mkdir()
    (left / "lock").touch()
    with runtime_dir() as one, socket.socket(socket.AF_UNIX) as other:
        assert not left.exists()  # nobody holds its lock
        with Router(one / ADMIN_SOCKET) as server:
            thread = threading.Thread(target=server.handle_request)
            thread.start()
            assert run("program", "rollback").out.startswith("version 2 is in charge")
            thread.join()
        with runtime_dir() as two:
            other.bind(str(two / ADMIN_SOCKET))
            assert admin_sockets() == sorted([one / ADMIN_SOCKET, two / ADMIN_SOCKET])
            write_card(one, "1p1d", "http://127.0.0.1:8000")
            shown = {one: "1p1d at http://127.0.0.1:8000", two: "starting"}
            choices = ", ".join(f"{path / ADMIN_SOCKET} ({shown[path]})" for path in sorted(shown))
            ran = run("engines", "list")
            assert f"several clusters run here; choose with --admin: {choices}\n" in ran.err


@pytest.mark.parametrize("command", ["program", "engines"])
def test_help_explains(run: Any, command: str) -> None:
    ran = run(command, "--help")
    assert ran.status == 0
    assert f"microserving {command} list" in ran.out
    assert run(command).status == 2
    assert run(command, "fly").status == 2
