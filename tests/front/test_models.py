"""Several names for the served model: each works, and an answer has the one that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from microserving.engine.config import EngineConfig
from microserving.front import create_front
from microserving.front.backend import ServedModel

from .fakes import ScriptedBackend, call, events


@pytest.fixture
def app() -> FastAPI:
    backend = ScriptedBackend()
    backend.model = ServedModel("org/tiny", max_context=64, created=1, aliases=("gpt-4o", "tiny"))
    return create_front(backend)


def test_every_name_is_listed_and_found(app: FastAPI) -> None:
    listed = call(app, "GET", "/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["org/tiny", "gpt-4o", "tiny"]
    for card in listed:
        assert call(app, "GET", f"/v1/models/{card['id']}").json() == card
    assert call(app, "GET", "/v1/models/tin").status_code == 404


@pytest.mark.case("API-39")
@pytest.mark.parametrize("name", ["org/tiny", "gpt-4o", "tiny"])
def test_an_answer_has_the_name_that_was_asked_for(app: FastAPI, name: str) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        request: dict[str, Any] = {"model": name, **body}
        assert call(app, "POST", path, json=request).json()["model"] == name
        streamed = events(call(app, "POST", path, json={**request, "stream": True}))
        assert len(streamed) > 1
        assert all(f'"model":"{name}"' in event for event in streamed[:-1])


def test_no_name_is_the_first_one(app: FastAPI) -> None:
    assert call(app, "POST", "/v1/completions", json={"prompt": "a"}).json()["model"] == "org/tiny"


@pytest.mark.parametrize("given", ["a,b", ["a", "b"], ("a , b",)])
def test_names_as_settings_have_them(given: Any) -> None:
    assert EngineConfig(served_model_name=given).served_model_name == ("a", "b")


@pytest.mark.parametrize("given", ["a,a", "a\x1bb", "x" * 257, 7, [7]])
def test_bad_names(given: Any) -> None:
    with pytest.raises(ValueError, match="served_model_name"):
        EngineConfig(served_model_name=given)
