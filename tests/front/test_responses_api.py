"""`/v1/responses` through the handler: what the model is asked, and what the client sees, whole and streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any, get_args

import httpx
import pytest
from fastapi import FastAPI
from openai.types.responses import Response, ResponseStreamEvent

from microserving.errors import EngineUnavailable, InvalidRequest, RateLimited
from microserving.front import FrontSettings, create_front
from microserving.protocol.generation import FinishReason, GenerationChunk, GenerationRequest

from .chats import CALL, backend
from .fakes import ScriptedBackend, call, pieces

EVENTS: dict[str, Any] = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for model in get_args(get_args(ResponseStreamEvent)[0])
}
"""The client's model of each event."""
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
}
FORMAT = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}


@lru_cache(maxsize=1)
def front(to: ScriptedBackend) -> FastAPI:
    return create_front(to)


def post(to: ScriptedBackend, **fields: Any) -> httpx.Response:
    return call(front(to), "POST", "/v1/responses", json={"input": "hi", **fields})


def whole(to: ScriptedBackend, **fields: Any) -> dict[str, Any]:
    response = post(to, **fields)
    assert response.status_code == 200, response.text
    return checked(response.json())


def checked(body: dict[str, Any]) -> dict[str, Any]:
    Response.model_validate(body)
    return body


def told(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each as the client's model has it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for number, event in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        assert body["sequence_number"] == number
        EVENTS[body["type"]].model_validate(body)
        found.append(body)
    return found


def streamed(to: ScriptedBackend, **fields: Any) -> dict[str, Any]:
    """The answer at the end of a stream, whose events make up the same output."""
    created, running, *rest, last = told(post(to, stream=True, **fields))
    assert (created["type"], running["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == running["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    items: list[dict[str, Any]] = []
    for event in rest:
        fold(items, event)
    final: dict[str, Any] = last["response"]
    assert items == final["output"]
    assert last["type"] == f"response.{final['status']}"
    changed = {"status", "output", "usage", "incomplete_details"}
    assert {name: final[name] for name in final.keys() - changed} == {
        name: value for name, value in created["response"].items() if name not in changed
    }
    return checked(final)


def fold(items: list[dict[str, Any]], event: dict[str, Any]) -> None:
    kind = event["type"]
    if kind == "response.output_item.added":
        assert event["output_index"] == len(items)
        assert event["item"]["status"] == "in_progress"
        items.append(event["item"])
        return
    item = items[event["output_index"]]
    assert event["output_index"] == len(items) - 1
    if kind == "response.output_item.done":
        item["status"] = event["item"]["status"]
        assert event["item"] == item
        return
    assert event["item_id"] == item["id"]
    if kind == "response.content_part.added":
        assert event["content_index"] == len(item["content"]) == 0
        item["content"].append(event["part"])
    elif kind == "response.content_part.done":
        assert event["part"] == item["content"][0]
    else:
        holder, name = (item, "arguments") if "arguments" in item else (item["content"][0], "text")
        if kind.endswith(".delta"):
            assert event["delta"]
            holder[name] += event["delta"]
        else:
            assert event[name] == holder[name]


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what is random."""
    response_id = answer.pop("id").removeprefix("resp_")
    del answer["created_at"]
    for index, item in enumerate(answer["output"]):
        assert item.pop("id").split("_", 1)[1] == f"{response_id}_{index}"
        if "call_id" in item:
            assert item.pop("call_id").startswith("call_")
    return answer


def texts(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Each item's type and text."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in answer["output"]
    ]


TEXTS = (
    "Hello, the END of",
    f"I look. {CALL}\n{CALL} So",
    '{"x": 1} END',
    "é <tool_cal",
    "<think>\nhm\n</think>\n\nSo.",
)


@pytest.mark.parametrize("text", TEXTS)
def test_joined_the_stream_is_the_whole_answer(text: str) -> None:
    choices: tuple[tuple[dict[str, Any], ...], ...] = (
        ({}, {"stop": ["END"]}),
        ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}),
        ({}, {"text": FORMAT}),
    )
    to = backend(text, template="<think>", seed=len(text))
    for parts in itertools.product(*choices):
        fields = dict(itertools.chain(*(part.items() for part in parts)))
        assert comparable(streamed(to, **fields)) == comparable(whole(to, **fields))


@pytest.mark.parametrize(
    ("text", "fields", "output"),
    [
        ("So", {}, [("message", "So")]),
        (CALL, {}, [("message", CALL)]),
        (CALL, {"tools": [TOOL]}, [("function_call", '{"city": "Paris"}')]),
        (
            f"I look. {CALL}{CALL}",
            {"tools": [TOOL]},
            [
                ("message", "I look."),
                ("function_call", '{"city": "Paris"}'),
                ("function_call", '{"city": "Paris"}'),
            ],
        ),
        (
            f"{CALL}{CALL}",
            {"tools": [TOOL], "parallel_tool_calls": False},
            [("function_call", '{"city": "Paris"}')],
        ),
        ("<think>hm</think>So", {}, [("reasoning", "hm"), ("message", "So")]),
        ("<think>hm", {}, [("reasoning", "hm")]),
        ("<think></think>", {}, [("message", "")]),
    ],
)
def test_the_output_is_thoughts_texts_and_calls(
    text: str, fields: dict[str, Any], output: list[tuple[str, str]]
) -> None:
    answer = whole(backend(text, template="<think>"), **fields)
    assert texts(answer) == output
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert (answer["status"], answer["incomplete_details"], answer["error"]) == ("completed", None, None)


@pytest.mark.parametrize("answer_of", [whole, streamed])
@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [("stop", "completed", None), ("length", "incomplete", {"reason": "max_output_tokens"})],
)
def test_how_it_ended(answer_of: Any, finish: FinishReason, status: str, details: Any) -> None:
    to = ScriptedBackend(pieces(["Hel", "lo"], finish))
    to.tokenizer = backend().tokenizer
    answer = answer_of(to)
    assert (answer["status"], answer["incomplete_details"]) == (status, details)
    assert answer["output"][0]["status"] == status
    assert texts(answer) == [("message", "Hello")]


@pytest.mark.parametrize("answer_of", [whole, streamed])
def test_an_empty_answer_is_an_empty_message(answer_of: Any) -> None:
    to = ScriptedBackend(pieces(["", ""]))
    to.tokenizer = backend().tokenizer
    assert texts(answer_of(to)) == [("message", "")]


@pytest.mark.parametrize("answer_of", [whole, streamed])
def test_usage_counts_what_was_read_cached_written_and_thought(answer_of: Any) -> None:
    async def play(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        text = "<think>hm é</think>\nSo"
        data = text.encode()
        yield GenerationChunk(text, tuple(data), "stop", len(request.prompt_token_ids), len(data), 3)

    to = backend(template="<think>")
    to.script = play
    assert answer_of(to)["usage"] == {
        "input_tokens": 4,  # "chat": a byte is a token
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 23,
        "output_tokens_details": {"reasoning_tokens": 21},  # all before the S
        "total_tokens": 27,
    }


def test_what_the_model_is_asked() -> None:
    to = backend("x")
    response = post(
        to,
        instructions="be",
        tools=[TOOL],
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.4,
        top_k=3,
        min_p=0.1,
        seed=5,
        stop="END",
        metadata={"a": "b"},
        user="u",
        store=True,
        chat_template_kwargs={"a": 1},
    )
    assert "x-ignored-fields" not in response.headers
    assert to.tokenizer.messages == [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    function = {name: TOOL[name] for name in ("name", "parameters")}
    assert to.tokenizer.options == {
        "tools": [{"type": "function", "function": function}],
        "variables": {"a": 1},
    }
    (asked,) = to.requests
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.4, 3, 0.1)
    assert (sampling.seed, asked.stop.max_tokens, asked.stop.stop) == (5, 7, ("END",))
    assert asked.metadata == {"a": "b"}
    answer = response.json()
    echoed = {"instructions": "be", "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.4, "store": False}
    echoed |= {
        "metadata": {"a": "b"},
        "user": "u",
        "tools": [{**TOOL, "strict": None}],
        "tool_choice": "auto",
    }
    assert {name: answer[name] for name in echoed} == echoed


def test_forms_and_forced_calls_bind_the_output() -> None:
    to = backend(CALL)
    post(to, text=FORMAT)
    post(to, text={"format": {"type": "json_object"}})
    post(to, tools=[TOOL], tool_choice="required")
    kinds = [request.grammar and request.grammar.kind for request in to.requests]
    assert kinds == ["json_schema", "json_object", "lark"]


def test_unknown_fields_are_named_or_refused() -> None:
    body = {"input": [{"role": "user", "content": "a", "ref": 1}], "reasoning": {"effort": "low"}}
    answer = call(create_front(backend("x")), "POST", "/v1/responses", json=body)
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "reasoning, input.ref")
    strict = create_front(backend("x"), FrontSettings(strict_fields=True))
    refused = call(strict, "POST", "/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "invalid_value"),
        ({"input": "a", "max_output_tokens": 64}, "max_output_tokens", "context_length_exceeded"),
        (
            {"text": {"format": {**FORMAT["format"], "schema": {"type": 5}}}},
            "text.format.schema",
            "invalid_value",
        ),
        ({"text": FORMAT, "ignore_eos": True}, "ignore_eos", "invalid_value"),
        ({"logit_bias": {"300": 1}}, "logit_bias.300", "invalid_value"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
def test_errors_before_the_first_event_have_a_status(
    fields: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    to = backend("x")
    response = post(to, stream=stream, **fields)
    assert response.status_code == (404 if code == "model_not_found" else 400)
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert to.requests == []


@pytest.mark.parametrize("param", ["messages", "messages[3].role"])
def test_the_chats_field_at_fault_is_the_input(param: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> list[int]:
        raise InvalidRequest("not this", param=param)

    to = backend("x")
    monkeypatch.setattr(to.tokenizer, "encode_chat", refuse)
    assert post(to).json()["error"]["param"] == "input"


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(EngineUnavailable("gone"), 502, "server_error"), (RateLimited("slow"), 429, "rate_limit_exceeded")],
)
def test_a_stream_that_fails_says_so_last(begun: bool, error: Exception, status: int, code: str) -> None:
    async def play(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        if begun:
            yield GenerationChunk("Hel", (1,), None, len(request.prompt_token_ids), 1)
            yield GenerationChunk("lo", (2,), None, len(request.prompt_token_ids), 2)
        raise error

    to = backend()
    to.script = play
    response = post(to, stream=True)
    assert to.active == 0
    if not begun:
        assert response.status_code == status
        assert set(response.json()) == {"error"}
        return
    last = told(response)[-1]
    assert last["type"] == "response.failed"
    failed = checked(last["response"])
    assert (failed["status"], failed["error"]) == ("failed", {"code": code, "message": str(error)})
    assert (texts(failed), failed["output"][0]["status"]) == ([("message", "Hello")], "incomplete")


def test_nothing_is_kept_to_be_asked_for() -> None:
    app = create_front(backend("x"))
    assert call(app, "GET", "/v1/responses").status_code == 405
    for method in ("GET", "DELETE"):
        assert call(app, method, "/v1/responses/resp_1").status_code == 404
