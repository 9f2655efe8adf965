"""The app as FastAPI: the document, the control routes' errors, and hot routes that no middleware touches."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from microserving.errors import EngineUnavailable
from microserving.front import control_router, create_front
from microserving.protocol.responses import Status

from .fakes import ScriptedBackend, call


def document() -> dict[str, Any]:
    response = call(create_front(ScriptedBackend()), "GET", "/openapi.json")
    assert response.status_code == 200
    body: dict[str, Any] = response.json()
    return body


def refs(value: Any) -> set[str]:
    """Every ``$ref`` in a document."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(refs, value.values()))
    return set().union(*map(refs, value)) if isinstance(value, list) else set()


def test_the_document_has_hot_and_control_routes() -> None:
    got = document()
    methods = {path: set(item) for path, item in got["paths"].items()}
    assert methods == {
        "/v1/completions": {"post"},
        "/v1/chat/completions": {"post"},
        "/v1/responses": {"post"},
        "/v1/models": {"get"},
        "/v1/models/{model_id}": {"get"},
        "/health": {"get"},
        "/ready": {"get"},
        "/tokenize": {"post"},
        "/detokenize": {"post"},
    }
    schemas = got["components"]["schemas"]
    assert all(ref.removeprefix("#/components/schemas/") in schemas for ref in refs(got))
    body = got["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    completion = schemas[body["$ref"].rsplit("/", 1)[1]]
    assert completion["required"] == ["prompt"]
    forms = [
        (form["type"], form.get("items", {}).get("type"))
        for form in completion["properties"]["prompt"]["anyOf"]
    ]
    assert forms == [("string", None), ("array", "string"), ("array", "integer"), ("array", "array")]
    assert completion["properties"]["temperature"]["maximum"] == 2
    assert schemas["ChatMessage"]["properties"]["role"]["enum"][:4] == [
        "system",
        "developer",
        "user",
        "assistant",
    ]


def test_no_operation_promises_a_422_and_all_promise_our_errors() -> None:
    got = document()
    operations = [operation for item in got["paths"].values() for operation in item.values()]
    errors = {"400", "401", "404", "409", "413", "429", "500", "502", "503", "504"}
    assert all(set(operation["responses"]) == {"200", *errors} for operation in operations)
    error = {"$ref": "#/components/schemas/ErrorAnswer"}
    assert all(
        o["responses"][status]["content"]["application/json"]["schema"] == error
        for o in operations
        for status in errors
    )
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert "HTTPValidationError" not in json.dumps(got)


def test_docs_show_the_document() -> None:
    response = call(create_front(ScriptedBackend()), "GET", "/docs")
    assert response.status_code == 200
    assert "/openapi.json" in response.text


def test_head_is_get() -> None:
    app = create_front(ScriptedBackend())
    assert call(app, "HEAD", "/health").status_code == 200
    assert call(app, "HEAD", "/v1/models/other").status_code == 404
    assert call(app, "HEAD", "/v1/completions").status_code == 405


def failing_app(error: Exception) -> FastAPI:
    async def fail() -> Status:
        raise error

    control = control_router()
    control.add_api_route("/fail", fail, response_model=Status)
    return create_front(ScriptedBackend(), control=control)


@pytest.mark.case("SC-16")
def test_control_routes_fail_in_our_shape() -> None:
    response = call(
        failing_app(EngineUnavailable("gone")), "GET", "/fail", headers={"x-request-id": "a\x1bb"}
    )
    assert response.status_code == 502
    assert response.headers["x-request-id"] == "ab"
    assert response.json()["error"] == {
        "message": "gone",
        "type": "server_error",
        "param": None,
        "code": "engine_unavailable",
    }


def test_a_bug_in_a_control_route_tells_nothing() -> None:
    response = call(failing_app(ValueError("secret path")), "GET", "/fail")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


def test_hot_routes_are_answered_before_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FastAPI puts around its routes grows from version to version; a completion must not pay for it."""
    app = create_front(ScriptedBackend())

    async def refuse(*_: object) -> None:
        raise AssertionError("FastAPI was asked")

    monkeypatch.setattr(FastAPI, "__call__", refuse)
    assert call(app, "POST", "/v1/completions", json={"prompt": "a"}).status_code == 200
    with pytest.raises(AssertionError, match="FastAPI was asked"):
        call(app, "GET", "/health")


def test_a_handler_that_is_cancelled_from_within_is_answered() -> None:
    async def cancelled(_: Any) -> Any:
        raise asyncio.CancelledError
        yield

    response = call(create_front(ScriptedBackend(cancelled)), "POST", "/v1/completions", json={"prompt": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
