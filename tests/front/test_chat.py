"""Chats through the handler: what is asked of the model, and what the client sees, whole and streamed."""

from __future__ import annotations

import itertools
import json
from functools import lru_cache
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from microserving.front import create_front

from .chats import CALL, backend
from .fakes import ScriptedBackend, call, events

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
NOW = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@lru_cache(maxsize=1)
def front(to: ScriptedBackend) -> FastAPI:
    return create_front(to)


def post(to: ScriptedBackend, **fields: Any) -> httpx.Response:
    return call(front(to), "POST", "/v1/chat/completions", json={**CHAT, **fields})


def whole(to: ScriptedBackend, **fields: Any) -> list[dict[str, Any]]:
    response = post(to, **fields)
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate(response.json(), strict=True)
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def streamed(to: ScriptedBackend, **fields: Any) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream make up, in the form of a whole answer; holds chunks to their rules."""
    *data, end = events(post(to, stream=True, **fields))
    assert end == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for chunk in map(json.loads, data):
        ChatCompletionChunk.model_validate(chunk, strict=True)
        (part,) = chunk["choices"]
        known = part["index"] in choices
        choice = choices.setdefault(
            part["index"],
            {"index": part["index"], "message": {"content": None}, "logprobs": None, "finish_reason": None},
        )
        assert choice["finish_reason"] is None
        assert ("role" in part["delta"]) == (not known)
        choice["finish_reason"] = part["finish_reason"]
        merge(choice["message"], part["delta"])
        choice.setdefault("token_ids", []).extend(part.get("token_ids", []))
        if part["logprobs"] is not None:
            scores = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"] = scores | {"content": scores["content"] + part["logprobs"]["content"]}
    return [choices[index] for index in sorted(choices)]


def merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if part["index"] == len(calls):
                    calls.append({key: part[key] for key in ("id", "type", "function")})
                else:
                    assert set(part) == {"index", "function"}
                    assert set(part["function"]) == {"arguments"}
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        elif name == "role" or value is None:
            message.setdefault(name, value)
        else:
            message[name] = (message.get(name) or "") + value


def comparable(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what only one of both has, or what is random."""
    for choice in choices:
        choice["message"].pop("refusal", None)
        choice.setdefault("token_ids", [])
        for each in choice["message"].get("tool_calls", ()):
            assert each.pop("id").startswith("call_")
    return choices


TEXTS = (
    "Hello, the END of",
    f"I look. {CALL}\n{CALL}",
    '{"x": 1} END',
    "é <tool_cal",
    "<think>\nhm\n</think>\n\nSo.",
)


@pytest.mark.case("API-35")
@pytest.mark.parametrize("seed", range(2))
def test_joined_the_stream_is_the_whole_answer_in_every_combination(seed: int) -> None:
    to = backend(*TEXTS, template="<think>" if seed else None, seed=seed)
    for n, stop, scores, tools, schema, ids in itertools.product(
        (1, len(TEXTS)),
        ({}, {"stop": ["END", "tool_calls_are"]}),
        ({}, {"logprobs": True, "top_logprobs": 1}),
        ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}),
        ({}, {"response_format": SCHEMA}),
        ({}, {"return_token_ids": True}),
    ):
        fields: dict[str, Any] = {"n": n} | stop | scores | tools | schema | ids  # type: ignore[operator]
        ours = comparable(whole(to, **fields))
        assert comparable(streamed(to, **fields)) == ours
        assert len(ours) == n
        if scores:
            lengths = [len(choice["logprobs"]["content"]) for choice in ours]
            assert all(lengths)
            assert not ids or lengths == [len(choice["token_ids"]) for choice in ours]


@pytest.mark.case("API-35")
def test_two_calls() -> None:
    (choice,) = whole(backend(f"{CALL}\n{CALL}"), tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["refusal"] is None
    assert [each["function"] for each in choice["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Paris"}'}
    ] * 2
    ids = [each["id"] for each in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    *data, _ = events(post(backend(f"{CALL}\n{CALL}"), tools=[TOOL], stream=True))
    deltas = [json.loads(event)["choices"][0]["delta"] for event in data]
    assert deltas[0]["role"] == "assistant"
    assert {part["index"] for delta in deltas for part in delta.get("tool_calls", ())} == {0, 1}
    assert "<tool_call>" not in "".join(data)


def test_without_tools_a_call_is_text() -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        to = backend(CALL)
        (choice,) = whole(to, **fields)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "tool_calls" not in choice["message"]
        assert to.tokenizer.options == {}


def test_what_the_model_is_told() -> None:
    to = backend("x")
    messages = [{"role": "user", "content": "hi", "name": "bob"}, {"role": "assistant", "content": "So"}]
    response = post(
        to,
        messages=messages,
        tools=[TOOL],
        continue_final_message=True,
        chat_template_kwargs={"a": 1},
    )
    assert response.headers["x-ignored-fields"] == "messages.name"
    assert to.tokenizer.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "So"},
    ]
    assert to.tokenizer.options == {"tools": [TOOL], "continue_final_message": True, "variables": {"a": 1}}


@pytest.mark.parametrize(
    ("fields", "names", "answers"),
    [
        ({"tool_choice": "required"}, ["weather", "now"], False),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ["now"], False),
        ({"response_format": SCHEMA}, ["weather", "now"], True),
        ({"response_format": SCHEMA, "tool_choice": "required"}, ["weather", "now"], False),
    ],
)
def test_a_grammar_makes_calls_certain(fields: dict[str, Any], names: list[str], answers: bool) -> None:
    to = backend(CALL)
    post(to, tools=[TOOL, NOW], **fields)
    (request,) = to.requests
    assert request.grammar is not None
    assert request.grammar.kind == "lark"
    assert [name for name in ("weather", "now") if name in request.grammar.text] == names
    assert ("answer: %json" in request.grammar.text) == answers


def test_no_grammar_where_the_model_may_say_anything() -> None:
    to = backend("x")
    post(to, tools=[TOOL])
    post(to, tools=[TOOL], tool_choice="none", response_format=SCHEMA)
    assert [request.grammar and request.grammar.kind for request in to.requests] == [None, "json_schema"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL], "guided_regex": "a+"}, "guided_regex"),
        ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 5}}}}
                ],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_tools_do_not_go_with(fields: dict[str, Any], param: str) -> None:
    to = backend("x")
    response = post(to, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert to.requests == []


@pytest.mark.parametrize("end", ["", "<think>\n"])
def test_thoughts_are_told_apart(end: str) -> None:
    text = "hm</think>\n\nSo." if end else "<think>hm</think>\n\nSo."
    (choice,) = whole(backend(text, template="{{ '<think>' }}", end=end))
    message = {"role": "assistant", "content": "So.", "refusal": None, "reasoning_content": "hm"}
    assert choice["message"] == message
    (plain,) = whole(backend(text))
    assert plain["message"]["content"] == text


def test_thoughts_go_on_where_a_message_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>I was"}]
    to = backend(" saying</think>So.", template="<think>")
    (choice,) = whole(to, messages=messages, continue_final_message=True)
    assert choice["message"]["reasoning_content"] == "saying"
    assert choice["message"]["content"] == "So."


def test_an_output_that_matches_a_grammar_has_no_thoughts() -> None:
    (choice,) = whole(backend('{"x": 1}', template="<think>", end="<think>\n"), response_format=SCHEMA)
    assert choice["message"]["content"] == '{"x": 1}'


@pytest.mark.case("API-07")
def test_tokens_that_are_held_back_are_told_with_what_comes() -> None:
    fields = {"tools": [TOOL], "logprobs": True, "return_token_ids": True, "stream": True}
    *data, _ = events(post(backend(CALL), **fields))
    parts = [json.loads(event)["choices"][0] for event in data]
    assert [bytes(i for part in parts for i in part["token_ids"])] == [CALL.encode()]
    assert all(part["delta"] or part["finish_reason"] for part in parts)
    scores = [len(part["logprobs"]["content"]) if part["logprobs"] else 0 for part in parts]
    assert scores == [len(part["token_ids"]) for part in parts]
