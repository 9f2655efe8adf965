"""The real `openai` client's chats: a loop of tools, structured answers, streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import openai
from pydantic import BaseModel

from microserving.front import create_front
from microserving.protocol.generation import GenerationChunk, GenerationRequest

from .chats import CALL, ChatTokenizer, backend, says
from .fakes import ScriptedBackend, live

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER: Any = {"role": "user", "content": "How is the weather in Paris?"}


@contextmanager
def client(to: ScriptedBackend) -> Iterator[openai.OpenAI]:
    with (
        live(create_front(to)) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def knows_the_answer() -> ScriptedBackend:
    """Calls the tool, until the chat has its answer."""
    to = backend()
    tokenizer: ChatTokenizer = to.tokenizer

    def play(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        answers = [message["content"] for message in tokenizer.messages if message["role"] == "tool"]
        return says(f"It is {answers[-1]}." if answers else f"I look.\n{CALL}\n{CALL}")(request)

    to.script = play
    return to


def answers(calls: Any) -> list[Any]:
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}] * 2
    return [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]


def test_a_loop_of_tools() -> None:
    with client(knows_the_answer()) as made:
        messages: list[Any] = [USER]
        while True:
            answer = made.chat.completions.create(model="org/tiny", messages=messages, tools=[WEATHER])
            message = answer.choices[0].message
            messages.append(message)
            if answer.choices[0].finish_reason != "tool_calls":
                break
            assert message.content == "I look."
            messages += answers(message.tool_calls)
        assert message.content == "It is sunny."
        assert message.tool_calls is None
    assert len(messages) == 5


def test_a_streamed_loop_of_tools() -> None:
    with client(knows_the_answer()) as made:
        messages: list[Any] = [USER]
        with made.chat.completions.stream(model="org/tiny", messages=messages, tools=[WEATHER]) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        assert kinds.count("tool_calls.function.arguments.done") == 2
        assert final.finish_reason == "tool_calls"
        messages += [final.message.to_dict(), *answers(final.message.tool_calls)]
        with made.chat.completions.stream(model="org/tiny", messages=messages, tools=[WEATHER]) as stream:
            text = stream.get_final_completion().choices[0].message.content
        assert text == "It is sunny."


class Event(BaseModel):
    name: str
    days: list[int]


def test_a_structured_answer_is_parsed() -> None:
    to = backend('{"name": "fair", "days": [1, 2]}')
    with client(to) as made:
        answer = made.beta.chat.completions.parse(model="org/tiny", messages=[USER], response_format=Event)
        with made.chat.completions.stream(model="org/tiny", messages=[USER], response_format=Event) as stream:
            streamed = stream.get_final_completion()
    for each in (answer, streamed):
        assert each.choices[0].message.parsed == Event(name="fair", days=[1, 2])
    assert all(request.grammar and request.grammar.kind == "json_schema" for request in to.requests)


class GetWeather(BaseModel):
    city: str


def test_the_arguments_of_a_call_are_parsed() -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="weather")
    with client(backend(CALL)) as made:
        answer = made.beta.chat.completions.parse(
            model="org/tiny", messages=[USER], tools=[tool], tool_choice="required"
        )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert len(calls) == 1
    assert calls[0].function.parsed_arguments == GetWeather(city="Paris")


def test_thoughts_and_log_probabilities() -> None:
    to = backend("<think>hm</think>So.", template="<think>")
    with client(to) as made:
        answer = made.chat.completions.create(
            model="org/tiny", messages=[USER], logprobs=True, top_logprobs=2
        )
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.reasoning_content) == ("So.", "hm")  # type: ignore[attr-defined]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == "<think>hm</think>So."
