"""`/v1/responses`: what of a request is refused, which chat it is, and what its answer's items are when they come back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.errors import InvalidRequest
from microserving.protocol.body import ignored_fields, validate
from microserving.protocol.chat_responses import CallArguments, CallBegin, Content, Piece, Reasoning
from microserving.protocol.generation import GenerationChunk
from microserving.protocol.responses_api.output import Output
from microserving.protocol.responses_api.request import ResponsesRequest
from microserving.protocol.responses_api.shape import ResponsesShape

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def request(**body: Any) -> ResponsesRequest:
    return validate(ResponsesRequest, {"input": "hi", **body})


def chat(*items: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return request(input=list(items), **body).template_messages()


def test_a_text_is_the_users_and_instructions_come_first() -> None:
    assert request().template_messages() == [USER]
    assert request(instructions="be").template_messages() == [{"role": "system", "content": "be"}, USER]


def test_messages_and_their_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = {"id": "m1", "type": "message", "role": "assistant", "status": "completed"}
    texts = [{"type": "output_text", "text": "c", "annotations": []}, {"type": "refusal", "refusal": "d"}]
    told = chat(
        {"role": "developer", "content": "x", "type": None},
        {"role": "user", "content": parts},
        {**said, "content": texts},
        {"role": "assistant", "content": "again"},
    )
    assert told == [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "cd"},
        {"role": "assistant", "content": "again"},
    ]


def called(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": '{"x": 1}'}


def test_calls_of_one_turn_are_one_message() -> None:
    function = {"name": "f", "arguments": '{"x": 1}'}
    told = chat(
        USER,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        called("a"),
        called("b"),
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "2"}],
        },
        called("c"),
    )
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in "abc"]
    assert told[1:] == [
        {"role": "assistant", "content": None, "tool_calls": calls[:2], "reasoning_content": "hm"},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
    ]


def test_thoughts_without_a_word_are_a_message_all_the_same() -> None:
    thoughts = {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "hm"}]}
    expected = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert chat(USER, thoughts, USER) == [USER, expected, USER]


@st.composite
def answers(draw: st.DrawFn) -> list[Piece]:
    """The pieces of a model's output: thoughts, then texts and calls as they come."""
    pieces: list[Piece] = [Reasoning(text) for text in draw(st.lists(st.text(min_size=1), max_size=2))]
    calls = 0
    for text in draw(st.lists(st.none() | st.text(min_size=1), max_size=6)):
        if text is None:
            pieces += [
                CallBegin(calls, f"call-{calls}", "f"),
                CallArguments(calls, "{"),
                CallArguments(calls, "}"),
            ]
            calls += 1
        else:
            pieces.append(Content(text))
    return pieces


@given(answers())
def test_what_an_answer_holds_comes_back_as_the_message_that_it_is(pieces: list[Piece]) -> None:
    output = Output("r")
    for piece in pieces:
        output.put(piece)
    output.end("completed")
    (user, message) = chat(USER, *json.loads(json.dumps(output.items())))
    texts = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    begun = [piece.call_id for piece in pieces if isinstance(piece, CallBegin)]
    assert user == USER
    assert message["content"] == (texts or (None if begun else ""))
    assert message.get("reasoning_content", "") == thoughts
    calls = message.get("tool_calls", [])
    assert [call["id"] for call in calls] == begun
    assert {call["function"]["arguments"] for call in calls} <= {"{}"}


def test_tools_and_formats_are_the_chats() -> None:
    schema = {"type": "object", "maximum": 10**30}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True, "description": "d"}
    got = request(tools=[TOOL], tool_choice={"type": "function", "name": "f"}, text={"format": form})
    assert got.forced_tools[0].definition == {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
    bound = got.constraint()
    assert bound is not None
    assert (json.loads(bound[0].text), bound[1]) == (schema, "text.format.schema")
    told = got.echo()
    assert told["text"] == {"format": form}
    assert told["tools"] == [{**TOOL, "strict": None}]
    assert told["tool_choice"] == {"type": "function", "name": "f"}
    assert request(text={"format": {"type": "text"}}).constraint() is None


def test_nothing_is_stored() -> None:
    assert request(store=True).echo()["store"] is False


def message(**fields: Any) -> dict[str, Any]:
    return {"input": [{**USER, **fields}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [USER] * 4097}, "input"),
        (message(role="tool"), "input.0.role"),
        (message(role=None), "input.0.role"),
        (message(content=None), "input.0.content"),
        (message(content=[]), "input.0.content"),
        (message(content=[{"type": "input_image", "image_url": "x"}]), "input.0.content"),
        (message(content=[{"type": ["input_text"], "text": "x"}]), "input.0.content"),
        (message(content=[{"type": "input_text"}]), "input.0.content"),
        (message(type="web_search_call"), "input.0.type"),
        (message(type=["message"]), "input.0.type"),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input.1.type"),
        ({"input": [{**called("a"), "call_id": None}]}, "input.0.call_id"),
        ({"input": [{**called("a"), "call_id": "a" * 257}]}, "input.0.call_id"),
        ({"input": [{**called("a"), "name": ""}]}, "input.0.name"),
        ({"input": [{**called("a"), "arguments": {"x": 1}}]}, "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input.0.output"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input.0.summary"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"n": 2}, "n"),
        ({"background": True}, "background"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"messages": [USER]}, "messages"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
    ],
)
def test_what_is_wrong_or_not_here_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        request(**body).constraint()
    assert refused.value.param == param


def test_what_is_ignored_is_named_also_within() -> None:
    body = {
        "input": [
            {**USER, "id": "x", "status": "completed", "phase": "p"},
            {**called("a"), "role": "user"},
            5,
        ],
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "include": [],
        "store": True,
    }
    assert ignored_fields(ResponsesRequest, body) == [
        "truncation",
        "include",
        "input.phase",
        "input.role",
        "text.verbosity",
    ]
    assert ignored_fields(ResponsesRequest, {"input": "a", "text": 5}) == []


@pytest.mark.parametrize("text", ["a", 'é"\\\n\x00\u2028', "😀"])
def test_the_short_way_to_an_event_writes_the_same_bytes(text: str) -> None:
    def begun() -> ResponsesShape:
        made = ResponsesShape(request_id="id", created=7, model="m", settings={})
        assert made.next_event(0, GenerationChunk("x", (4,))) is None  # nothing has begun
        assert made.events(0, GenerationChunk("", (3,)), first=True).count(b"event: ") == 2
        assert made.next_event(0, GenerationChunk("x", (4,))) is None  # no message is open
        made.events(0, GenerationChunk("x", (4,)), first=False)
        return made

    short, long = begun(), begun()
    for _ in range(2):
        chunk = GenerationChunk(text, (5,))
        assert short.next_event(0, chunk) == long.events(0, chunk, first=False)
    assert short.next_event(0, GenerationChunk("", (5,))) is None
    assert short.next_event(0, GenerationChunk(text, (5,), "stop")) is None
