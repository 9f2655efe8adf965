"""Routes, methods, headers and bodies."""

from __future__ import annotations

import pytest

from microserving.front import FrontSettings, create_front
from microserving.front.settings import MAX_TEXT_BODY_BYTES, MIN_BODY_BYTES

from .fakes import ScriptedBackend, call

BODY = {"prompt": "abc"}


def test_models() -> None:
    app = create_front(ScriptedBackend())
    model = {
        "id": "org/tiny",
        "object": "model",
        "created": 1700000000,
        "owned_by": "microserving",
        "max_model_len": 64,
    }
    assert call(app, "GET", "/v1/models").json() == {"object": "list", "data": [model]}
    assert call(app, "GET", "/v1/models/org/tiny").json() == model
    assert call(app, "GET", "/v1/models/org%2Ftiny").json() == model
    response = call(app, "GET", "/v1/models/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_health_and_readiness() -> None:
    backend = ScriptedBackend()
    alive = True
    app = create_front(backend, alive=lambda: alive)
    assert call(app, "GET", "/health").json() == {"status": "ok"}
    assert call(app, "GET", "/ready").json() == {"status": "ready"}
    backend.ready = False
    assert call(app, "GET", "/health").status_code == 200
    response = call(app, "GET", "/ready")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    backend.ready_after_refresh = True
    assert call(app, "GET", "/ready").status_code == 200
    alive = False
    assert call(app, "GET", "/health").status_code >= 500


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("POST", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("GET", "/redoc", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_wrong_methods(method: str, path: str, status: int, code: str) -> None:
    response = call(create_front(ScriptedBackend()), method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    if status == 404:
        assert "/v1" in response.json()["error"]["message"]
        assert "/docs" in response.json()["error"]["message"]


@pytest.mark.case("PD-15")
def test_the_clients_request_id_is_echoed_and_never_used() -> None:
    backend = ScriptedBackend()
    app = create_front(backend)
    ids = []
    for _ in range(2):
        response = call(
            app, "POST", "/v1/completions", json={**BODY, "user": "same"}, headers={"X-Request-Id": "same"}
        )
        assert response.headers["x-request-id"] == "same"
        ids.append(response.json()["id"])
    assert ids[0] != ids[1]
    assert backend.requests[0].request_id != backend.requests[1].request_id
    own = call(app, "POST", "/v1/completions", json=BODY)
    assert own.json()["id"] == f"cmpl-{own.headers['x-request-id']}"


@pytest.mark.case("SC-16")
def test_a_hostile_request_id_is_cleaned() -> None:
    app = create_front(ScriptedBackend())
    headers = {"x-request-id": b"a\x1b[31m\tb \xe9" + b"c" * 500}
    echoed = call(app, "POST", "/v1/completions", json=BODY, headers=headers).headers["x-request-id"]
    assert echoed.startswith("a[31mb")
    assert echoed.isprintable()
    assert len(echoed) <= 128


@pytest.mark.case("API-26")
@pytest.mark.parametrize("content", [b"", b'{"prompt":,}', b'{"prompt":"\xff"}', b"\xef\xbb\xbf{}", b"[]"])
def test_a_broken_body_is_a_400(content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = call(create_front(ScriptedBackend()), "POST", path, content=content)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_content_type_does_not_matter() -> None:
    app = create_front(ScriptedBackend())
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"):
        response = call(
            app, "POST", "/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": kind}
        )
        assert response.status_code == 200


@pytest.mark.case("SC-12")
@pytest.mark.parametrize("declared", [True, False])
def test_the_body_limit_is_enforced_while_reading(declared: bool) -> None:
    app = create_front(ScriptedBackend(), FrontSettings(max_body_bytes=100))
    sent = 0

    async def endless():  # type: ignore[no-untyped-def]
        nonlocal sent
        while sent < 10_000:
            sent += 10
            yield b" " * 10

    headers = {"content-length": "10000"} if declared else {}
    response = call(app, "POST", "/v1/completions", content=endless(), headers=headers)
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
    assert response.json()["error"]["code"] == "payload_too_large"
    assert sent <= 120


@pytest.mark.case("SC-12")
def test_the_body_limit_follows_from_the_model() -> None:
    settings = FrontSettings()
    assert settings.body_limits(64, 1).max_bytes == MIN_BODY_BYTES
    assert settings.body_limits(8192, 81).max_bytes == 8192 * 81 * 3
    assert settings.body_limits(131_072, 128).max_bytes == MAX_TEXT_BODY_BYTES
    assert settings.body_limits(8192, None).max_bytes == MAX_TEXT_BODY_BYTES
    assert settings.body_limits(0, None).max_bytes == MAX_TEXT_BODY_BYTES
    million = settings.body_limits(2**20, 128)  # its prompt as ids: seven digits, a comma, a space each
    assert million.max_bytes >= 9 * 2**20
    assert million.max_values >= 2**20
    assert FrontSettings(max_body_bytes=7).body_limits(8192, 81).max_bytes == 7


def test_a_body_over_the_derived_limit_is_a_413() -> None:
    app = create_front(ScriptedBackend())
    small = b'{"prompt":"a","padding":"%s"}'
    fits = small % (b"z" * (MIN_BODY_BYTES - len(small) + 2))
    assert call(app, "POST", "/v1/completions", content=fits).status_code == 200
    assert call(app, "POST", "/v1/completions", content=fits + b" ").status_code == 413
