"""What of a client's request reaches a router program beside the prompt: headers and metadata."""

from __future__ import annotations

from typing import Any

import pytest

from microserving.front import FrontSettings, create_front
from microserving.front.client_headers import MAX_HEADERS, routing_headers

from .fakes import ScriptedBackend, call

TEXT = {"model": "org/tiny", "prompt": "abc"}


def routed(*headers: tuple[str, str]) -> dict[str, str]:
    return routing_headers([(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers])


def test_hints_for_routing_pass() -> None:
    given = {"x-tenant": "blue", "x-session": "42", "user-agent": "test/1", "traceparent": "00-ab-cd-01"}
    assert routed(*given.items(), ("accept", "*/*"), ("host", "example.org")) == given


@pytest.mark.parametrize(
    "name",
    [
        "authorization",
        "proxy-authorization",
        "cookie",
        "set-cookie",
        "x-api-key",
        "x-auth-user",
        "x-access-token",
        "x-csrf",
        "x-client-cert",
        "x-amz-signature",
        "x-forwarded-for",
        "x-real-ip",
    ],
)
def test_what_tells_who_somebody_is_does_not_pass(name: str) -> None:
    assert routed((name, "value"), ("x-tenant", "blue")) == {"x-tenant": "blue"}


def test_count_and_sizes_are_bounded() -> None:
    many = [(f"x-h{i}", "v") for i in range(100)]
    assert len(routed(*many)) == MAX_HEADERS == 16
    assert routed(("x-" + "n" * 63, "v"), ("x-long", "v" * 257)) == {}
    assert routed(("x-" + "n" * 62, "v" * 256)) != {}
    assert routed(("x-odd", "a\tb"), ("x-latin", "\xe9")) == {}
    assert routed(("x-twice", "first"), ("x-twice", "second")) == {"x-twice": "first"}


@pytest.mark.parametrize("chat", [False, True])
def test_they_reach_the_backend(chat: bool) -> None:
    backend = ScriptedBackend()
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": ["a", "b"]}
    )
    body = {"model": "org/tiny", **prompt, "metadata": {"team": "blue", "empty": ""}}
    headers = {"X-Tenant": "t1", "Authorization": "Bearer secret", "Cookie": "c=1"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = call(create_front(backend, FrontSettings()), "POST", path, json=body, headers=headers)
    assert answer.status_code == 200
    assert "x-ignored-fields" not in answer.headers
    assert len(backend.requests) == (1 if chat else 2)
    for request in backend.requests:
        assert request.metadata == {"team": "blue", "empty": ""}
        assert request.headers["x-tenant"] == "t1"
        assert not {"authorization", "cookie"} & set(request.headers)


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        "text",
        {"k": 1},
        {"k": None},
        {"k": {"nested": "no"}},
        {"": "v"},
        {"k" * 65: "v"},
        {"k": "v" * 513},
        {str(i): "v" for i in range(17)},
    ],
)
def test_bad_metadata_is_refused(metadata: Any) -> None:
    backend = ScriptedBackend()
    app = create_front(backend, FrontSettings())
    answer = call(app, "POST", "/v1/completions", json={**TEXT, "metadata": metadata})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "metadata"
    assert backend.requests == []
