"""The real `openai` client's responses: texts, streams, structured answers, a loop of tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from microserving.errors import EngineUnavailable
from microserving.protocol.generation import GenerationChunk, GenerationRequest

from .chats import backend
from .test_openai_chat_client import WEATHER, client, knows_the_answer

MODEL = "org/tiny"
TOOL: Any = {"type": "function", **WEATHER["function"], "strict": False}


def test_a_text_whole_and_streamed() -> None:
    with client(backend("Hello, é world")) as made:
        answer = made.responses.create(model=MODEL, input="hi", instructions="be", max_output_tokens=50)
        assert answer.output_text == "Hello, é world"
        assert (answer.status, answer.instructions, answer.max_output_tokens) == ("completed", "be", 50)
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (
            4,
            14,
            18,
        )
        stream = made.responses.create(model=MODEL, input="hi", stream=True)
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert len(deltas) > 1
        assert "".join(deltas) == answer.output_text


def test_the_stream_helper() -> None:
    with client(backend("Hello, world")) as made:
        with made.responses.stream(model=MODEL, input="hi") as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        deltas = kinds.count("response.output_text.delta")
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert deltas > 1
    assert (final.output_text, final.usage and final.usage.output_tokens) == ("Hello, world", 12)


class Event(BaseModel):
    name: str
    days: list[int]


def test_a_structured_answer_is_parsed() -> None:
    to = backend('{"name": "fair", "days": [1, 2]}')
    with client(to) as made:
        answer = made.responses.parse(model=MODEL, input="hi", text_format=Event)
        with made.responses.stream(model=MODEL, input="hi", text_format=Event) as stream:
            streamed = stream.get_final_response()
    for each in (answer, streamed):
        assert each.output_parsed == Event(name="fair", days=[1, 2])
    assert all(request.grammar and request.grammar.kind == "json_schema" for request in to.requests)


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools(stream: bool) -> None:
    """What an answer holds is sent back as it is."""
    to = knows_the_answer()
    with client(to) as made:
        items: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
        for _ in range(2):
            if stream:
                with made.responses.stream(model=MODEL, input=items, tools=[TOOL]) as events:
                    answer: Any = events.get_final_response()
            else:
                answer = made.responses.create(model=MODEL, input=items, tools=[TOOL])
            items += [item.to_dict() for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            items += [
                {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls
            ]
            assert [call.arguments for call in calls] in ([], ['{"city": "Paris"}'] * 2)
    assert answer.output_text == "It is sunny."
    roles = [message["role"] for message in to.tokenizer.messages]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert to.tokenizer.messages[1]["content"] == "I look."
    assert [call["function"]["name"] for call in to.tokenizer.messages[1]["tool_calls"]] == ["weather"] * 2


def test_thoughts() -> None:
    with client(backend("<think>hm</think>So.", template="<think>")) as made:
        answer: Any = made.responses.create(model=MODEL, input="hi")
        with made.responses.stream(model=MODEL, input="hi") as stream:
            streamed: Any = stream.get_final_response()
    for each in (answer, streamed):
        assert each.output[0].content[0].text == "hm"
        assert each.output_text == "So."
        assert each.usage.output_tokens_details.reasoning_tokens == 17  # with the marks


def test_errors() -> None:
    with client(backend("x")) as made:
        with pytest.raises(openai.NotFoundError) as missing:
            made.responses.create(model="other", input="hi")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            made.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
        assert bad.value.param == "previous_response_id"


def test_a_stream_that_fails() -> None:
    async def play(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        yield GenerationChunk("Hel", (1,), None, len(request.prompt_token_ids), 1)
        raise EngineUnavailable("gone")

    to = backend()
    to.script = play
    with client(to) as made:
        events: list[Any] = list(made.responses.create(model=MODEL, input="hi", stream=True))
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", "gone")
    assert failed.output_text == "Hel"
