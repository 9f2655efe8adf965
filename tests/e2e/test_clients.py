"""Clients as people use them, against the router: the `openai` package in all its ways, LangChain, LiteLLM."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from .conftest import Cluster
from .processes import MODEL, environment, wait_idle

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    large: bool


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.router}/v1", api_key="none", timeout=60, max_retries=0) as client:
        yield client
    wait_idle(cluster.engines)


def test_async_and_the_streaming_helper(cluster: Cluster, client: OpenAI) -> None:
    expected = client.chat.completions.create(messages=QUESTION, max_tokens=10, **GREEDY)

    async def ask() -> tuple[str | None, Any, str]:
        async with AsyncOpenAI(base_url=f"{cluster.router}/v1", api_key="none", max_retries=0) as asking:
            plain = await asking.chat.completions.create(messages=QUESTION, max_tokens=10, **GREEDY)
            text = ""
            options: Any = {"include_usage": True}
            async with asking.chat.completions.stream(
                messages=QUESTION, max_tokens=10, stream_options=options, **GREEDY
            ) as stream:
                async for event in stream:
                    if event.type == "content.delta":
                        text += event.delta
                try:
                    final = await stream.get_final_completion()
                except openai.LengthFinishReasonError as error:
                    final = error.completion
            return plain.choices[0].message.content, final, text

    plain, final, text = asyncio.run(ask())
    assert plain == text == final.choices[0].message.content == expected.choices[0].message.content
    assert final.usage.completion_tokens == expected.usage.completion_tokens  # type: ignore[union-attr]


def test_structured_parse(client: OpenAI) -> None:
    answer = client.chat.completions.parse(messages=QUESTION, max_tokens=40, response_format=City, **GREEDY)
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    assert answer.choices[0].message.content is not None
    assert json.loads(answer.choices[0].message.content) == parsed.model_dump()
    with client.chat.completions.stream(
        messages=QUESTION, max_tokens=40, response_format=City, **GREEDY
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_a_tool_loop(client: OpenAI) -> None:
    messages: list[Any] = [*QUESTION]
    ask: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 80, **GREEDY}
    answer = client.chat.completions.create(
        messages=messages, tool_choice="required", parallel_tool_calls=False, **ask
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert calls
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    for call in calls:
        assert call.type == "function"
        assert call.function.name == "weather"
        city = json.loads(call.function.arguments)["city"]
        assert city in ("Paris", "Rome")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"It is sunny in {city}."})
    last = client.chat.completions.create(messages=messages, tool_choice="none", **ask)
    assert last.choices[0].message.content
    assert not last.choices[0].message.tool_calls
    with client.chat.completions.stream(
        messages=QUESTION, tool_choice="required", parallel_tool_calls=False, **ask
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed is not None
    assert [call.function.arguments for call in streamed] == [call.function.arguments for call in calls]  # type: ignore[union-attr]


def test_errors_have_their_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-17", messages=QUESTION)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(messages=QUESTION, **(GREEDY | {"temperature": 3}), stream=stream)
        assert bad.value.param == "temperature"


def run(script: str, cluster: Cluster) -> dict[str, Any]:
    """The JSON that a client's process prints."""
    command = [sys.executable, str(Path(__file__).with_name(script)), f"{cluster.router}/v1", MODEL]
    # The model is local: nothing is to be looked up, or reported, elsewhere.
    settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGCHAIN_TRACING_V2": "false"}
    ended = subprocess.run(
        command, env=environment() | settings, capture_output=True, text=True, timeout=110, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    said: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return said


@pytest.mark.case("API-03")
def test_langchain(cluster: Cluster, client: OpenAI) -> None:
    expected = client.chat.completions.create(messages=QUESTION, max_tokens=12, **GREEDY)
    said = run("client_langchain.py", cluster)
    assert said["whole"] == said["streamed"] == expected.choices[0].message.content
    assert expected.usage is not None
    used = [expected.usage.prompt_tokens, expected.usage.completion_tokens, expected.usage.total_tokens]
    for usage in (said["whole_usage"], said["streamed_usage"]):
        assert [usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]] == used
    assert said["finish"] == [expected.choices[0].finish_reason] * 2
    assert [name for name, _ in said["calls"]] == ["weather"] * len(said["calls"])
    assert said["calls"]
    assert all(arguments["city"] in ("Paris", "Rome") for _, arguments in said["calls"])
    assert City.model_validate(said["parsed"])


def test_litellm(cluster: Cluster, client: OpenAI) -> None:
    expected = client.chat.completions.create(messages=QUESTION, max_tokens=12, **GREEDY)
    text = client.completions.create(prompt="The capital of France is", max_tokens=12, **GREEDY)
    said = run("client_litellm.py", cluster)
    assert said["chat"] == said["streamed"] == expected.choices[0].message.content
    assert expected.usage is not None
    assert said["usage"] == [expected.usage.prompt_tokens, expected.usage.completion_tokens]
    assert said["text"] == text.choices[0].text
    assert said["missing"] == 404
