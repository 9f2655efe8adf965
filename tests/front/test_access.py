"""API keys and the limits of one client: at the table of keys, and on every route of an app."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx
import pytest

from microserving.errors import ConfigError, RateLimited, Unauthorized
from microserving.front import ApiKeys, ClientLimits, FrontSettings, create_front
from microserving.front.access import MAX_CLIENTS, Access, read_bearer

from .fakes import ScriptedBackend, call

KEY = "sk-0123456789abcdef"
OTHER = "sk-fedcba9876543210"


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


def test_a_key_file_has_names_comments_and_bare_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# clients\n  # old\nalice {KEY}\n  {OTHER}  \n")
    keys = ApiKeys.read(path)
    assert keys.identify(bearer(KEY)) == "alice"
    assert keys.identify(bearer(OTHER)) == "key-4"
    assert read_bearer(path) == b"Bearer " + KEY.encode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no API key"),
        ("# nothing\n", "no API key"),
        ("short\n", "16 printable"),
        (f"a b {KEY}\n", "line 1: .* not 3 words"),
        (f"a {KEY}\nb {KEY}\n", "'b' is there twice"),
        ("schlüssel-0123456789\n", "not ASCII"),
    ],
)
def test_a_wrong_key_file_is_refused_without_showing_keys(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as raised:
        ApiKeys.read(path)
    assert KEY not in raised.value.message


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys.read(tmp_path / "none")


WRONG = [
    [],
    [(b"authorization", b"")],
    [(b"authorization", b"Bearer")],
    [(b"authorization", b"Bearer ")],
    [(b"authorization", b"Basic " + KEY.encode())],
    [(b"authorization", KEY.encode())],
    [(b"authorization", b"Bearer " + KEY[:-1].encode())],
    [(b"authorization", b"Bearer " + KEY.encode() + b"x")],
    [(b"authorization", b"Bearer " + KEY.upper().encode())],
    [(b"authorization", b"Bearer \xff\xfe")],
    bearer(KEY) * 2,
    [*bearer("wrong"), *bearer(KEY)],
    [(b"x-api-key", KEY.encode())],
]


@pytest.mark.case("SC-09")
@pytest.mark.parametrize("headers", WRONG)
def test_nothing_but_one_right_bearer_token_is_let_in(headers: list[tuple[bytes, bytes]]) -> None:
    keys = ApiKeys([("alice", KEY)])
    with pytest.raises(Unauthorized):
        keys.identify(headers)


def test_the_scheme_has_no_case() -> None:
    assert ApiKeys([("a", KEY)]).identify([(b"authorization", b"bearer  " + KEY.encode())]) == "a"


@pytest.mark.case("SC-09")
def test_every_route_but_two_needs_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    app = create_front(ScriptedBackend(), FrontSettings(api_keys=ApiKeys([("alice", KEY)])))
    routes = [("GET", path) for path in ("/v1/models", "/v1/models/x", "/docs", "/openapi.json", "/nothing")]
    routes += [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/completions")]
    routes += [("POST", "/v1/responses"), ("GET", "/v1/responses/x")]
    routes += [("HEAD", "/v1/models"), ("OPTIONS", "/v1/completions"), ("PUT", "/health/x")]
    for method, path in routes:
        refused = call(app, method, path, headers={"authorization": f"Bearer {OTHER}"})
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer"), path
        if method != "HEAD":
            assert refused.json()["error"]["type"] == "authentication_error"
    assert [call(app, "GET", path).status_code for path in ("/health", "/ready")] == [200, 200]
    headers = {"authorization": f"Bearer {KEY}"}
    assert call(app, "GET", "/v1/models", headers=headers).status_code == 200
    answer = call(app, "POST", "/v1/completions", headers=headers, json={"prompt": "a"})
    assert answer.json()["choices"][0]["text"] == "Hello world"
    assert not [text for text in caplog.messages if KEY in text or OTHER in text]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_a_minute_come_at_once_then_evenly() -> None:
    clock = Clock()
    access = Access(None, ClientLimits(requests_per_minute=6), clock)
    for _ in range(6):
        access.leave(access.enter([], "1.2.3.4"))
    with pytest.raises(RateLimited) as refused:
        access.enter([], "1.2.3.4")
    assert refused.value.retry_after_s == pytest.approx(10.0)  # six a minute: one each ten seconds
    access.enter([], "5.6.7.8")  # somebody else
    clock.now = 10.0
    access.enter([], "1.2.3.4")
    with pytest.raises(RateLimited):
        access.enter([], "1.2.3.4")


def test_the_uses_that_are_remembered_are_bounded_and_running_ones_kept() -> None:
    access = Access(None, ClientLimits(max_concurrent=1))
    access.enter([], "running")
    for number in range(MAX_CLIENTS + 100):
        access.leave(access.enter([], str(number)))
    assert len(access._uses) == MAX_CLIENTS
    with pytest.raises(RateLimited):
        access.enter([], "running")


def test_a_client_has_so_many_requests_at_once() -> None:
    backend = ScriptedBackend()
    held = asyncio.Event()

    async def play(request: object) -> object:
        await held.wait()
        async for chunk in ScriptedBackend().script(request):  # type: ignore[arg-type]
            yield chunk

    backend.script = play  # type: ignore[assignment]
    keys = ApiKeys([("alice", KEY), ("bob", OTHER)])
    app = create_front(backend, FrontSettings(api_keys=keys, client_limits=ClientLimits(max_concurrent=2)))

    async def run() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def ask(key: str) -> httpx.Response:
                headers = {"authorization": f"Bearer {key}"}
                return await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)

            running = [asyncio.create_task(ask(KEY)) for _ in range(2)]
            while backend.active < 2:  # noqa: ASYNC110 - the fake has no event for a loop
                await asyncio.sleep(0)
            refused = await ask(KEY)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            others = asyncio.create_task(ask(OTHER))
            while backend.active < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
            held.set()
            assert {(await task).status_code for task in [*running, others]} == {200}
            assert (await ask(KEY)).status_code == 200

    asyncio.run(run())
