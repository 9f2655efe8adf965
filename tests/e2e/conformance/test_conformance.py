"""OpenAI's API through every door: the same assertions for one engine alone and for each router program."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ..processes import MODEL
from .door import CHAT, COMPLETIONS, QUESTION, Door

PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@PATHS
@pytest.mark.case("API-01")
@pytest.mark.case("API-03")
def test_usage_is_streamed_once_and_only_when_asked_for(door: Door, path: str) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"stream_options": None},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": True}},
    ]
    bodies = [{"stream": True, **more} for more in options]
    *without, with_usage, whole = door.all([(path, {**GREEDY, **body}) for body in [*bodies, {}]])
    assert all(answer.usage is None for answer in without)
    assert with_usage.counts == whole.counts
    assert whole.counts is not None
    assert whole.counts[2] == whole.counts[0] + whole.counts[1]


@PATHS
@pytest.mark.case("API-04")
def test_the_text_ends_before_a_stop_wherever_it_lies(door: Door, path: str) -> None:
    long = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    text = door.ask(path, **long).text
    assert len(text) > 40
    stops = [text[begin : begin + size] for begin, size in ((3, 2), (7, 5), (11, 12), (20, 3), (29, 9))]
    options: list[dict[str, Any]] = [{}, {"stream": True}]
    asked = [(path, {**long, "stop": [stop], **option}) for stop in stops for option in options]
    for (_, body), answer in zip(asked, door.all(asked), strict=True):
        assert answer.text == text[: text.index(body["stop"][0])]
        assert answer.choices[0].finish_reason == "stop"


@PATHS
@pytest.mark.case("API-19")
def test_null_is_the_same_as_absent(door: Door, path: str) -> None:
    schema = door.http.get("/openapi.json").json()["components"]["schemas"]
    name = "ChatCompletionRequest" if path == CHAT else "CompletionRequest"
    fields = set(schema[name]["properties"]) - {"model", "prompt", "messages", *GREEDY}
    assert len(fields) > 20
    assert door.ask(path, **GREEDY, **dict.fromkeys(fields)).text == door.ask(path, **GREEDY).text


@PATHS
@pytest.mark.case("API-29")
def test_what_is_unknown_is_ignored_and_named(door: Door, path: str) -> None:
    more: dict[str, Any] = {"store": False, "service_tier": "auto", "user": "u1", "foo": 1}
    known: dict[str, Any] = {"metadata": {"k": "v"}}
    if path == CHAT:
        more["messages"] = [{**QUESTION[0], "ref": "m-1", "ui": {"pin": True}}]
    assert door.ask(path, **GREEDY, **more, **known).text == door.ask(path, **GREEDY).text
    body = {"prompt": "a", "messages": QUESTION, **GREEDY, **more, **known}
    del body["messages" if path == COMPLETIONS else "prompt"]
    named = door.post(path, **body).headers["x-ignored-fields"].split(", ")
    assert "foo" in named
    if path == CHAT:
        assert {"messages.ref", "messages.ui"} <= set(named)


@pytest.mark.case("API-45")
def test_a_seed_decides_alone(door: Door) -> None:
    body = {"temperature": 0.9, "seed": 42, "max_tokens": 8}
    free = {"temperature": 1, "max_tokens": 8}
    asked: list[dict[str, Any]] = [body, body, {**body, "seed": 43}, free, free, {**body, "n": 2}]
    answers = door.all([(COMPLETIONS, one) for one in asked])
    first, again, other, one, two, pair = [[choice.text for choice in answer.choices] for answer in answers]
    assert first == again
    assert first != other
    assert one != two
    assert pair[0] == first[0] != pair[1]


@pytest.mark.case("API-25")
def test_the_ends_of_ranges(door: Door) -> None:
    greedy = door.ask(COMPLETIONS, **GREEDY).text
    tiny: list[dict[str, Any]] = [
        {"temperature": 1, "top_p": 0},
        {"temperature": 1, "top_p": 1e-9},
        {"temperature": 2, "top_k": 1},
        {"temperature": 1, "min_p": 1},
        {"temperature": 1e-9},
        {"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1},
    ]
    answers = door.all([(COMPLETIONS, {**GREEDY, **body}) for body in tiny])
    assert [answer.text for answer in answers] == [greedy] * len(tiny)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}),
    ("n", {"n": 1.5}),
    ("n", {"n": "2"}),
    ("n", {"n": 10**9}),
    ("temperature", {"temperature": 2.0001}),
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 1.0001}),
    ("top_p", {"top_p": -0.1}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 10**7}),
    ("seed", {"seed": "x"}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["", "END"]}),
    ("stop", {"stop": [5]}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop_token_ids", {"stop_token_ids": [10**6]}),
    ("logit_bias.777777", {"logit_bias": {"777777": 3}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"abc": 1}}),
    ("logit_bias", {"logit_bias": {"3": 1e9}}),
    ("logit_bias", {"logit_bias": {str(key): 1 for key in range(5000)}}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": 7}),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("response_format", {"response_format": "json_object"}),
    ("response_format", {"response_format": {}}),
    ("response_format", {"response_format": []}),
]


@PATHS
@pytest.mark.case("STR-03")
@pytest.mark.case("API-13")
@pytest.mark.case("API-23")
@pytest.mark.case("API-37")
@pytest.mark.case("API-43")
def test_what_is_wrong_is_refused_by_name_also_when_streamed(door: Door, path: str) -> None:
    base: dict[str, Any] = {"messages": QUESTION} if path == CHAT else {"prompt": "a"}
    own: list[tuple[str, dict[str, Any]]] = [("messages", {"messages": []}), ("messages.0.role", {"messages": [
        {"role": "admin", "content": "a"}]})] if path == CHAT else [("prompt", {"prompt": []}), ("prompt", {"prompt": [
        "a", ""]})]  # fmt: skip
    for (param, wrong), stream in itertools.product([*REFUSED, *own], (False, True)):
        response = door.post(path, **{**base, **wrong, **({} if "stream" in wrong else {"stream": stream})})
        assert response.status_code == 400, (wrong, response.text)
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["param"].startswith(param), (wrong, error)
        assert error["message"]


def test_another_model_and_the_models(door: Door) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": QUESTION})):
        for stream in (False, True):
            response = door.post(path, **{"model": "gpt-17", "stream": stream, **body})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    listed = door.http.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == [MODEL]
    assert door.http.get(f"/v1/models/{MODEL}").json() == listed["data"][0]


def test_four_forms_of_a_prompt(door: Door) -> None:
    text = "The capital of France is"
    ids = door.post("/tokenize", prompt=text).json()["tokens"]
    one, several, of_ids, lists = door.all(
        [
            (COMPLETIONS, {**GREEDY, "prompt": prompt})
            for prompt in (text, [text, "One, two,"], ids, [ids, ids[:2]])
        ]
    )
    assert several.choices[0] == one.choices[0] == of_ids.choices[0] == lists.choices[0]
    assert one.counts is not None
    assert one.counts[0] == len(ids)
    assert lists.counts is not None
    assert lists.counts[0] == len(ids) + 2


@pytest.mark.case("API-32")
def test_tokenize_counts_what_a_prompt_counts(door: Door) -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": " of France?"}]
    for messages in (QUESTION, [{"role": "user", "content": parts}]):
        answer = door.post("/tokenize", messages=messages).json()
        used = door.ask(CHAT, messages=messages, max_tokens=1).usage
        assert used is not None
        assert answer["count"] == len(answer["tokens"]) == used["prompt_tokens"]
    back = door.post("/detokenize", tokens=door.post("/tokenize", prompt="Élan 😀 x").json()["tokens"]).json()
    assert back == {"prompt": "Élan 😀 x"}
