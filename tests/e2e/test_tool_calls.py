"""The real model made to call tools: one engine alone and through prefill and decode, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from .conftest import Cluster
from .processes import MODEL

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city", "parameters": PARAMETERS},
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [WEATHER, NOW],
    "temperature": 0.8,
    "seed": 11,
    "max_tokens": 200,
}
CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "get_weather"}}]


def calls_of(client: OpenAI, choice: Any) -> tuple[list[tuple[str, str]], str | None]:
    """Names and arguments, which are the same streamed, and the finish reason."""
    fields = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**fields).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
    assert not answer.message.content
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls or ()] == calls
    assert final.finish_reason == answer.finish_reason
    return calls, answer.finish_reason


@pytest.mark.timeout(300)
def test_a_call_that_is_required_comes_and_is_valid(hybrid: str, cluster: Cluster) -> None:
    for choice in CHOICES:
        answers = []
        for url in (hybrid, cluster.router):
            with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0) as client:
                answers.append(calls_of(client, choice))
        (calls, finish), routed = answers
        assert routed == (calls, finish)
        assert finish == "tool_calls"
        assert len(calls) == 1
        for name, arguments in calls:
            assert name in ("get_weather", "now")
            jsonschema.validate(json.loads(arguments), PARAMETERS if name == "get_weather" else {})


@pytest.mark.timeout(120)
def test_a_chat_goes_on_behind_a_call(hybrid: str) -> None:
    """The tool's answer reaches the model, whose template knows no tools."""
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "It is sunny and 25 degrees."},
    ]
    with OpenAI(base_url=f"{hybrid}/v1", api_key="none", timeout=120, max_retries=0) as client:
        fields = {**ASKED, "messages": messages, "temperature": 0, "max_tokens": 40}
        longer = client.chat.completions.create(**fields)
        shorter = client.chat.completions.create(**{**fields, "messages": messages[:1]})
    assert longer.usage is not None
    assert shorter.usage is not None
    assert longer.usage.prompt_tokens > shorter.usage.prompt_tokens + 20
