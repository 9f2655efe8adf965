"""A client's timeout and cache salt: what the backend gets, and what is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from microserving.front import FrontSettings, create_front

from .fakes import ScriptedBackend, call, pieces

TEXT: dict[str, Any] = {"model": "org/tiny", "prompt": "abc"}


def post(backend: ScriptedBackend, body: dict[str, Any], header: str | None = None) -> httpx.Response:
    headers = {} if header is None else {"x-request-timeout": header.encode()}
    app = create_front(backend, FrontSettings())
    return call(app, "POST", "/v1/completions", json=TEXT | body, headers=headers)


@pytest.mark.parametrize(
    ("body", "header", "limit"), [(60, None, 60), (None, "50", 50), (60, "30.5", 30.5), (20, "30", 20)]
)
def test_the_smaller_timeout_counts(body: float | None, header: str | None, limit: float) -> None:
    backend = ScriptedBackend()
    assert post(backend, {"timeout": body}, header).status_code == 200
    (request,) = backend.requests
    assert request.timeout_s is not None
    assert limit - 5 < request.timeout_s < limit  # what is left of it when the backend is asked


def test_without_a_timeout_there_is_no_deadline() -> None:
    backend = ScriptedBackend()
    assert post(backend, {}).status_code == 200
    assert backend.requests[0].timeout_s is None


@pytest.mark.parametrize("header", ["", "0", "-1", "nan", "inf", "1e3", "5s", "99999999", "٣", "1.2.3"])
def test_a_bad_header_names_itself(header: str) -> None:
    backend = ScriptedBackend()
    response = post(backend, {}, header)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-timeout")
    assert not backend.requests


def test_a_deadline_that_has_passed_is_a_504() -> None:
    backend = ScriptedBackend()
    response = post(backend, {}, "0.0000001")
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert not backend.requests


@pytest.mark.case("PX-03")
def test_the_salt_reaches_the_backend_as_it_is() -> None:
    backend = ScriptedBackend()
    for salt in ["a|b", "a\0b", "", None, "None"]:
        assert post(backend, {"cache_salt": salt}).status_code == 200
    assert [request.cache_salt for request in backend.requests] == ["a|b", "a\0b", "", "", "None"]
    assert post(backend, {"cache_salt": "s" * 10_000}).json()["error"]["param"] == "cache_salt"


def test_choices_that_wait_for_their_turn_have_the_same_deadline() -> None:
    """One at a time: the time of those that wait runs, too."""
    backend = ScriptedBackend(pieces(["a"] * 3))
    app = create_front(backend, FrontSettings(max_concurrent_choices=1))
    assert call(app, "POST", "/v1/completions", json=TEXT | {"n": 4, "timeout": 60}).status_code == 200
    left = [request.timeout_s or 0.0 for request in backend.requests]
    assert 60 > left[0] > left[1] > left[2] > left[3] > 50
