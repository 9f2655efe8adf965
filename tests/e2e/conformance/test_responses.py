"""`/v1/responses` through every door: the chat's answer in other words, whole and streamed, as the real client reads it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import pytest
from openai import OpenAI
from openai.types.responses import Response

from ..processes import MODEL
from .door import CHAT, QUESTION, Answer, Door
from .forms import COLOUR, NEVER, PAINT, SCHEMA, TOOLS

SEEDED: Final[dict[str, Any]] = {"temperature": 0.9, "seed": 11, "stop": NEVER}
PAINTING: Final = {"type": "function", "name": "paint", "parameters": COLOUR}
FORMS: Final[dict[str, tuple[int, dict[str, Any], dict[str, Any]]]] = {
    "text": (6, {}, {}),
    "schema": (16, SCHEMA, {"text": {"format": {"type": "json_schema", "name": "c", "schema": COLOUR}}}),
    "call": (
        28,
        {"tools": TOOLS[:1], "tool_choice": PAINT},
        {"tools": [PAINTING], "tool_choice": {"type": "function", "name": "paint"}},
    ),
}
"""Token limit, what a chat says, what a response says."""


@contextmanager
def client(door: Door) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{door.url}/v1", api_key="none", timeout=120, max_retries=0) as made:
        yield made


def whole(made: OpenAI, limit: int, fields: dict[str, Any]) -> Response:
    return made.responses.create(
        model=MODEL, input=QUESTION, max_output_tokens=limit, extra_body={**SEEDED, **fields}
    )


def streamed(made: OpenAI, limit: int, fields: dict[str, Any]) -> Response:
    """The last event's answer, which the deltas make up."""
    body = {**SEEDED, **fields}
    events: list[Any] = list(
        made.responses.create(
            model=MODEL, input=QUESTION, max_output_tokens=limit, extra_body=body, stream=True
        )
    )
    final: Response = events[-1].response
    text = "".join(event.delta for event in events if event.type.endswith(".delta"))
    assert text == said(final)[0]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return final


def said(answer: Response) -> tuple[str, str | None]:
    """What was said or called, and how the answer ended."""
    (item,) = answer.output
    return item.arguments if item.type == "function_call" else answer.output_text, answer.status


def counts(answer: Response) -> tuple[int, int, int]:
    assert answer.usage is not None
    return answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens


@functools.cache
def chats(engine: Door) -> list[Answer]:
    """What the engine alone answers to each chat."""
    return engine.all([(CHAT, {**SEEDED, "max_tokens": limit, **chat}) for limit, chat, _ in FORMS.values()])


@pytest.mark.timeout(300)
def test_a_response_is_the_chats_answer_in_other_words(door: Door, engine: Door) -> None:
    with client(door) as made, ThreadPoolExecutor(8) as pool:
        asked = [(made, limit, fields) for limit, _, fields in FORMS.values()]
        wholes = [pool.submit(whole, *one) for one in asked]
        streams = [pool.submit(streamed, *one) for one in asked]
        for chat, one, other in zip(chats(engine), wholes, streams, strict=True):
            (choice,) = chat.choices
            text = choice.tool_calls[0]["arguments"] if choice.tool_calls else choice.text
            status = "incomplete" if choice.finish_reason == "length" else "completed"
            assert said(one.result()) == said(other.result()) == (text, status)
            assert counts(one.result()) == counts(other.result()) == chat.counts


def test_what_was_called_is_sent_back(engine: Door) -> None:
    with client(engine) as made:
        first = whole(made, 40, FORMS["call"][2])
        (call,) = first.output
        assert call.type == "function_call"
        assert json.loads(call.arguments)["colour"] in ("red", "blue")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "painted"}
        items: list[Any] = [*QUESTION, call.to_dict(), output]
        second = made.responses.create(model=MODEL, input=items, max_output_tokens=4, temperature=0)
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        *QUESTION,
        {
            "role": "assistant",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "painted"},
    ]
    chat = engine.ask(CHAT, messages=messages, max_tokens=4, temperature=0)
    assert (second.output_text, counts(second)) == (chat.text, chat.counts)


def test_errors_have_the_apis_names(door: Door) -> None:
    for stream in (False, True):
        for param, body in (
            ("max_output_tokens", {"max_output_tokens": 10**6}),
            ("input", {"input": "a " * 20_000}),
            ("previous_response_id", {"previous_response_id": "resp_1"}),
        ):
            response = door.post("/v1/responses", **{"input": QUESTION, "stream": stream, **body})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
