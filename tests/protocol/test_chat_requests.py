"""A chat's fields: messages, tools, and what is refused rather than dropped."""

from __future__ import annotations

from typing import Any

import pytest

from microserving.errors import InvalidRequest
from microserving.protocol.body import ignored_fields, validate
from microserving.protocol.chat import ChatCompletionRequest
from microserving.protocol.chat_tools import MAX_TOOLS

USER = {"role": "user", "content": "a"}


def chat(**fields: Any) -> ChatCompletionRequest:
    return validate(ChatCompletionRequest, {"messages": [USER], **fields})


def refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


@pytest.mark.case("API-31")
@pytest.mark.parametrize("role", ["function", "SYSTEM", "admin", "", 5, None, ["user"]])
def test_roles_that_nobody_knows_are_refused(role: Any) -> None:
    refused({"messages": [{"role": role, "content": "a"}]}, "messages.0.role")


@pytest.mark.case("API-31")
def test_messages_reach_the_template_with_all_that_they_say() -> None:
    """Whether `developer` is `system` is the template's to say."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "d", "name": "boss"},
        {
            "role": "assistant",
            "tool_calls": [{**call, "index": 0}],
            "reasoning_content": "hm",
            "refusal": None,
        },
        {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"},
    ]
    assert chat(messages=messages).template_messages() == [
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "f"},
    ]
    assert ignored_fields(ChatCompletionRequest, {"messages": messages, "store": True}) == [
        "store",
        "messages.name",
    ]
    assert ignored_fields(ChatCompletionRequest, {"messages": [5]}) == []


@pytest.mark.case("API-32")
def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "count to "}, {"type": "text", "text": "three"}]
    request = chat(messages=[{"role": "user", "content": parts}])
    assert request.template_messages() == [{"role": "user", "content": "count to three"}]


@pytest.mark.case("API-32")
@pytest.mark.parametrize(
    "content",
    [[], None, 5, {}, [{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], ["a"]]
    + [[{"type": "text", "text": None}], [{"type": []}]],
)
def test_content_that_is_not_text_is_refused(content: Any) -> None:
    for role in ("user", "assistant"):
        refused({"messages": [{"role": role, "content": content}]}, "messages.0.content")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a", "tool_calls": [tool()]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": []}, "content"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", **tool()} | {"type": "custom"}]},
            "tool_calls",
        ),
        ({"role": "assistant", "tool_calls": [tool(arguments=5)]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [{**tool(), "id": "x" * 257}]}, "tool_calls"),
        ({"role": "assistant", "tool_calls": [tool()] * (MAX_TOOLS + 1)}, "tool_calls"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "tool", "content": "a"}, "tool_call_id"),
        ({"role": "tool", "content": "a", "tool_call_id": 5}, "tool_call_id"),
        ({"role": "tool", "tool_call_id": "c"}, "content"),
    ],
)
def test_messages_that_are_none(message: dict[str, Any], param: str) -> None:
    refused({"messages": [message]}, f"messages.0.{param}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{**tool(), "type": "custom"}]}, "tools"),
        ({"tools": [tool("")]}, "tools"),
        ({"tools": [tool("a b")]}, "tools"),
        ({"tools": [tool("x" * 65)]}, "tools"),
        ({"tools": [tool(description=5)]}, "tools"),
        ({"tools": [tool(parameters=[])]}, "tools"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [tool(description="x" * 300_000)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": tool("g")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_wrong_tools_and_choices(fields: dict[str, Any], param: str) -> None:
    refused(fields, param)


def test_which_tools_are_offered_and_which_are_forced() -> None:
    tools = [tool("f", description="d", parameters={"properties": {}}, strict=True), tool("g")]
    for choice, offered, forced, several in [
        (None, "fg", "", True),
        ("none", "", "", True),
        ("required", "fg", "fg", True),
        (tool("g"), "fg", "g", False),
    ]:
        request = chat(tools=tools, tool_choice=choice)
        assert "".join(tool.name for tool in request.offered_tools) == offered
        assert "".join(tool.name for tool in request.forced_tools) == forced
        assert request.several_calls == several
    assert not chat(tools=tools, parallel_tool_calls=False).several_calls
    assert [t.parameters for t in chat(tools=tools).tools] == [{"type": "object", "properties": {}}] * 2
    assert "strict" not in chat(tools=tools).tools[0].definition["function"]
    chat(tools=[], tool_choice="auto", functions=[], function_call="none")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [USER, {"role": "assistant", "content": "b"}], "continue_final_message": True}
            | {"add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_wrong_options(fields: dict[str, Any], param: str) -> None:
    refused(fields, param)


def test_what_the_template_is_asked_for() -> None:
    assert chat().template_options == {}
    assert chat(add_generation_prompt=True).template_options == {}
    assert chat(add_generation_prompt=False).template_options == {"add_generation_prompt": False}
    asked = chat(
        messages=[{"role": "assistant", "content": "b"}],
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
        tools=[tool()],
    )
    assert asked.template_options == {
        "continue_final_message": True,
        "variables": {"enable_thinking": False},
        "tools": [tool(parameters={"type": "object", "properties": {}})],
    }
