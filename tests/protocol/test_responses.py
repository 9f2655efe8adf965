"""The shapes of OpenAI's answers, checked with the `openai` package's own types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from microserving.protocol.chat_responses import ChatShape
from microserving.protocol.generation import GenerationChunk
from microserving.protocol.responses import ChoicesShape, CompletionShape, FinishedChoice, Usage, dump

SHAPES: dict[str, type[ChoicesShape]] = {"completion": CompletionShape, "chat": ChatShape}


def shape(kind: str, *, usage: bool = False, ids: bool = False) -> ChoicesShape:
    return SHAPES[kind](request_id="id-1", created=7, model='m"é', include_usage=usage, token_ids=ids)


def chunks(answer: ChoicesShape, *pieces: GenerationChunk) -> list[dict[str, Any]]:
    return [json.loads(e) for i, piece in enumerate(pieces) for e in answer.chunks(0, piece, first=i == 0)]


@pytest.mark.case("API-39")
@pytest.mark.case("API-41")
def test_chat_chunks() -> None:
    got = chunks(shape("chat"), GenerationChunk("Hé", (1,)), GenerationChunk("y", (2,), "stop", 3, 2))
    constants = {"id": "chatcmpl-id-1", "object": "chat.completion.chunk", "created": 7, "model": 'm"é'}
    deltas = [({"role": "assistant", "content": "Hé"}, None), ({"content": "y"}, None), ({}, "stop")]
    assert got == [
        {**constants, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}
        for delta, finish in deltas
    ]
    for chunk in got:
        ChatCompletionChunk.model_validate(chunk, strict=True)


@pytest.mark.case("API-39")
def test_completion_chunks() -> None:
    got = chunks(shape("completion"), GenerationChunk("a"), GenerationChunk("b", (), "length", 1, 2))
    constants = {"id": "cmpl-id-1", "object": "text_completion", "created": 7, "model": 'm"é'}
    assert got == [
        {**constants, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]}
        for text, finish in [("a", None), ("b", "length")]
    ]


@pytest.mark.case("API-07")
def test_nothing_to_show_is_no_chunk() -> None:
    assert shape("chat").chunks(0, GenerationChunk("", (1,)), first=True) == []
    assert shape("completion").chunks(0, GenerationChunk("", (1,)), first=True) == []


def test_an_empty_answer_still_has_its_role_and_finish() -> None:
    got = chunks(shape("chat"), GenerationChunk("", (), "stop", 1, 0))
    assert [chunk["choices"][0]["delta"] for chunk in got] == [{"role": "assistant", "content": ""}, {}]


def test_token_ids_are_carried_once_when_asked_for() -> None:
    pieces = (GenerationChunk("", (1, 2)), GenerationChunk("a", (3,), "stop", 1, 3))
    for kind in ("chat", "completion"):
        got = chunks(shape(kind, ids=True), *pieces)
        assert [token for chunk in got for token in chunk["choices"][0]["token_ids"]] == [1, 2, 3]


@pytest.mark.case("API-01")
@pytest.mark.case("API-03")
def test_usage_only_when_asked_for_and_only_at_the_end() -> None:
    assert shape("chat").usage_chunk(Usage(3)) is None
    asked = shape("chat", usage=True)
    assert chunks(asked, GenerationChunk("a"))[0]["usage"] is None
    last = json.loads(asked.usage_chunk(Usage(3, 1, 4, 2)) or b"")
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    ChatCompletionChunk.model_validate(last, strict=True)


@pytest.mark.case("API-39")
def test_whole_answers() -> None:
    choices = [FinishedChoice("a", (1,), "stop"), FinishedChoice("bc", (2, 3), "length")]
    text = json.loads(shape("completion").answer(choices, Usage(5, 2, 3)))
    assert Completion.model_validate(text, strict=True).choices[1].text == "bc"
    assert text["usage"] == Usage(5, completion_tokens=3).body()
    chat = json.loads(shape("chat", ids=True).answer(choices, Usage(5, 2, 3)))
    parsed = ChatCompletion.model_validate(chat, strict=True)
    assert [choice.message.content for choice in parsed.choices] == ["a", "bc"]
    assert chat["object"] == "chat.completion"
    assert [choice["token_ids"] for choice in chat["choices"]] == [[1], [2, 3]]


def test_usage_counts_a_prompts_cached_tokens_once() -> None:
    """Two prompts (5 tokens together), two choices of each: the second choice finds what the first one left."""
    usage = Usage(5, choices=2)
    for index, (completion, cached) in enumerate([(4, 1), (3, 3), (2, 0), (1, 2)]):
        usage.count(index, GenerationChunk("", (), "stop", 3, completion, cached))
    assert (usage.completion_tokens, usage.cached_tokens) == (10, 1)


@pytest.mark.case("API-14")
def test_strict_json_always() -> None:
    with pytest.raises(ValueError):
        dump({"logprob": float("-inf")})


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("text", ["a", 'é"\\\n\x00\u2028', "😀"])
def test_the_short_way_to_an_event_writes_the_same_bytes(kind: str, usage: bool, text: str) -> None:
    answer = shape(kind, usage=usage)
    for index in (0, 3):
        chunk = GenerationChunk(text, (5,))
        (slow,) = answer.chunks(index, chunk, first=False)
        assert answer.next_event(index, chunk) == b"data: " + slow + b"\n\n"
    assert shape(kind, ids=True).next_event(0, GenerationChunk(text, (5,))) is None
    assert answer.next_event(0, GenerationChunk(text, (5,), "stop")) is None
    assert answer.next_event(0, GenerationChunk("", (5,))) is None
