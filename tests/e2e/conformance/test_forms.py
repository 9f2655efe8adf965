"""Every form of an answer through every door: streamed and joined it is the whole one, and both are the engine's own."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from .door import CHAT, COMPLETIONS, QUESTION, Answer, Door
from .forms import FORMS, SEEDED, SKY, finished

STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def bodies(path: str) -> list[dict[str, Any]]:
    prompt: dict[str, Any] = {"messages": QUESTION} if path == CHAT else {"prompt": SKY}
    return [prompt | SEEDED | form for form in FORMS[path].values()]


@functools.cache
def by_one_engine(engine: Door, path: str) -> list[Answer]:
    """The whole answers of the engine alone."""
    return engine.all([(path, body) for body in bodies(path)])


def prompt_counts(door: Door, body: dict[str, Any]) -> list[int]:
    """Of each prompt, as `/tokenize` counts it."""
    if "messages" in body:
        return [len(door.post("/tokenize", **body).json()["tokens"])]
    prompt = body["prompt"]
    if isinstance(prompt, list):
        return [len(ids) for ids in prompt]
    return [len(door.post("/tokenize", prompt=prompt).json()["tokens"])]


def check_usage(answer: Answer, body: dict[str, Any], prompts: list[int]) -> None:
    """Each prompt counts once and each token that was made once, whatever was shown of it."""
    assert answer.counts is not None
    in_prompts, made, both = answer.counts
    assert (in_prompts, both) == (sum(prompts), in_prompts + made)
    if body["return_token_ids"]:
        assert made == sum(len(choice.token_ids) for choice in answer.choices)
    if isinstance(body.get("logprobs"), int) and body["logprobs"] is not False:
        echoed = sum(prompts) * body.get("n", 1) if body.get("echo") else 0
        assert made == sum(len(choice.logprobs) for choice in answer.choices) - echoed
    limit = min(body["max_tokens"], body.get("max_completion_tokens", body["max_tokens"]))
    assert made <= len(answer.choices) * limit
    assert made >= len(answer.choices) * body.get("min_tokens", 0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.case("API-07")
@pytest.mark.case("API-11")
@pytest.mark.case("API-14")
@pytest.mark.case("API-17")
@pytest.mark.case("API-39")
@pytest.mark.case("STR-07")
@pytest.mark.timeout(300)
def test_a_stream_joined_is_the_whole_answer_and_that_of_one_engine(
    door: Door, engine: Door, path: str
) -> None:
    asked = bodies(path)
    expected = by_one_engine(engine, path)
    streamed_ones = door.all([(path, body | STREAMED) for body in asked])
    whole_ones = expected if door is engine else door.all([(path, body) for body in asked])
    for form, body, streamed, whole, alone in zip(
        FORMS[path], asked, streamed_ones, whole_ones, expected, strict=True
    ):
        assert streamed.choices == whole.choices, form
        assert whole.choices == alone.choices, form
        assert streamed.counts == whole.counts == alone.counts, form
        check_usage(whole, body, prompt_counts(door, body))
        for choice in whole.choices:
            finished(choice, form)


def test_the_forms_show_what_they_are_for(engine: Door) -> None:
    """None of them is satisfied by answers that hold nothing of what was asked for."""
    texts = dict(zip(FORMS[COMPLETIONS], by_one_engine(engine, COMPLETIONS), strict=True))
    chats = dict(zip(FORMS[CHAT], by_one_engine(engine, CHAT), strict=True))
    for answers in (texts, chats):
        assert "stop" in {choice.finish_reason for choice in answers["stops"].choices}
    assert all(choice.text.startswith(SKY) for choice in texts["echo"].choices)
    assert texts["scoring"].text == SKY
    assert texts["nothing"].choices[0].text == ""
    assert {choice.finish_reason for choice in texts["nothing"].choices} == {"length"}
    assert len(texts["min_tokens"].choices[0].token_ids) == 4  # three, and the end that is biased
    assert len(chats["min_tokens"].choices[0].token_ids) == 4
    scored = texts["prompt_logprobs"]
    assert scored.usage is not None
    assert all(len(choice.prompt_logprobs) == scored.usage["prompt_tokens"] for choice in scored.choices)
    for form in ("regex", "schema"):
        assert {choice.finish_reason for choice in texts[form].choices} == {"stop"}
        assert {choice.finish_reason for choice in chats[form].choices} == {"stop"}
    for form in ("required tool", "named tool"):
        assert all(choice.tool_calls and not choice.text for choice in chats[form].choices)
        assert {choice.finish_reason for choice in chats[form].choices} == {"tool_calls"}
    assert not chats["no tools"].choices[0].tool_calls
    assert [call["name"] for call in chats["half a call"].choices[0].tool_calls] == ["paint"]


@pytest.mark.parametrize("more", [{}, {"regex": "[a-z]{2,9}[.!]"}], ids=["free", "regex"])
def test_the_best_of_some_candidates(door: Door, engine: Door, more: dict[str, Any]) -> None:
    sampling: dict[str, Any] = {"prompt": SKY, "seed": 5, "temperature": 1.2, "max_tokens": 5, **more}
    best = door.ask(COMPLETIONS, n=2, best_of=4, logprobs=0, **sampling)
    all_four = engine.ask(COMPLETIONS, n=4, logprobs=0, **sampling).choices
    ranked = sorted(
        all_four, key=lambda choice: -sum(row[1] for row in choice.logprobs) / len(choice.logprobs)
    )
    assert best.choices == ranked[:2]
    assert best.usage is not None
    assert best.usage["completion_tokens"] == sum(len(choice.logprobs) for choice in all_four)
    streamed = door.post(COMPLETIONS, **sampling, best_of=4, stream=True)
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "best_of")
