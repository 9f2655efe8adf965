"""Web pages of other origins: off by default, then exactly those that are named."""

from __future__ import annotations

from microserving.front import FrontSettings, create_front

from .fakes import ScriptedBackend, call

PAGE = "https://page.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST"}
ALLOW = "access-control-allow-origin"


def test_it_is_off_by_default() -> None:
    app = create_front(ScriptedBackend())
    assert call(app, "OPTIONS", "/v1/completions", headers=PREFLIGHT).status_code == 405
    for path in ("/v1/models", "/health"):
        assert ALLOW not in call(app, "GET", path, headers={"origin": PAGE}).headers


def test_a_named_page_may_ask_and_another_may_not() -> None:
    app = create_front(ScriptedBackend(), FrontSettings(cors_origins=(PAGE + "/",)))
    for path in ("/v1/completions", "/v1/models"):
        allowed = call(app, "OPTIONS", path, headers=PREFLIGHT)
        assert (allowed.status_code, allowed.headers[ALLOW]) == (204, PAGE)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        foreign = call(app, "OPTIONS", path, headers=PREFLIGHT | {"origin": "https://evil.example"})
        assert ALLOW not in foreign.headers
    answer = call(app, "POST", "/v1/completions", json={"prompt": "a"}, headers={"origin": PAGE})
    assert (answer.status_code, answer.headers[ALLOW], answer.headers["vary"]) == (200, PAGE, "origin")
    models = call(app, "GET", "/v1/models", headers={"origin": "https://evil.example"})
    assert (models.status_code, ALLOW in models.headers) == (200, False)


def test_every_page_may_ask_with_a_star() -> None:
    app = create_front(ScriptedBackend(), FrontSettings(cors_origins=("*",)))
    assert call(app, "GET", "/v1/models", headers={"origin": PAGE}).headers[ALLOW] == "*"
