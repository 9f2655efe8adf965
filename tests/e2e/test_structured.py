"""Structured output of the real model: it validates, and it is the same through a router as from one engine."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import httpx
import jsonschema
import pytest

from .conftest import Cluster
from .processes import MODEL, completion, token_ids
from .random_schemas import random_schema

SCHEMAS = int(os.environ.get("MICROSERVING_TEST_SCHEMAS", "6"))
"""100 for the whole set."""
PROMPT = "Fill in the form with short values, as JSON:\n"


def is_date(value: object) -> bool:
    """As RFC 3339 has it: with the year 0000, which Python lacks and which is a leap year."""
    return not isinstance(value, str) or bool(date.fromisoformat(re.sub("^0000", "2000", value)))


def body(schema: dict[str, Any], seed: int, **more: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "form", "strict": True, "schema": schema}}
    fields = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0.9, "seed": seed, "response_format": form}
    return {**fields, "return_token_ids": True, **more}


def choice(url: str, request: dict[str, Any]) -> dict[str, Any]:
    return dict(completion(url, timeout_s=400, **request)["choices"][0])


@pytest.mark.timeout(1200)
def test_random_schemas_are_kept_to(hybrid: str) -> None:
    """Every finished answer validates; and most do finish."""
    checker = jsonschema.FormatChecker(["uuid", "ipv4", "date"])
    checker.checks("date", ValueError)(is_date)
    schemas = [random_schema(number) for number in range(SCHEMAS)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: choice(hybrid, body(schemas[n], seed=n)), range(SCHEMAS)))
    finished = [n for n, answer in enumerate(answers) if answer["finish_reason"] == "stop"]
    for number in finished:
        value = json.loads(answers[number]["text"])
        jsonschema.Draft202012Validator(schemas[number], format_checker=checker).validate(value)
    assert len(finished) >= 0.7 * SCHEMAS


@pytest.mark.timeout(300)
def test_a_router_changes_no_token(hybrid: str, cluster: Cluster) -> None:
    """Schemas, a choice, an expression and a grammar; n of them, too."""
    requests = [body(random_schema(number), seed=number, max_tokens=60) for number in (3, 4)]
    plain = {"prompt": PROMPT, "temperature": 0.9, "seed": 5, "max_tokens": 40, "return_token_ids": True}
    requests += [
        {**plain, "guided_choice": ["apple", "pear", "birne"], "n": 3},
        {**plain, "structured_outputs": {"regex": "[A-Z][a-z]{2,9} [0-9]{1,4}"}, "frequency_penalty": 1.0},
        {**plain, "guided_grammar": 'start: "[" (/[0-9]+/ ","){2,4} "]"'},
    ]
    for request in requests:
        alone, routed = completion(hybrid, **request), completion(cluster.router, **request)
        assert token_ids(routed) == token_ids(alone)
        assert [c["text"] for c in routed["choices"]] == [c["text"] for c in alone["choices"]]
        assert [c["finish_reason"] for c in routed["choices"]] == [
            c["finish_reason"] for c in alone["choices"]
        ]


@pytest.mark.timeout(300)
def test_the_forms_are_kept_to_through_a_router(cluster: Cluster) -> None:
    plain = {"prompt": PROMPT, "temperature": 1.0, "seed": 5, "max_tokens": 60}
    picked = completion(cluster.router, **plain, guided_choice=["apple", "pear"], n=4)
    assert {each["text"] for each in picked["choices"]} <= {"apple", "pear"}
    matched = choice(cluster.router, {**plain, "guided_regex": "[A-Z][a-z]{2,9} [0-9]{1,4}"})
    assert re.fullmatch("[A-Z][a-z]{2,9} [0-9]{1,4}", matched["text"])


@pytest.mark.timeout(300)
def test_a_chat_answers_with_an_object(hybrid: str) -> None:
    messages = [{"role": "user", "content": "Give me a tiny JSON object with one key."}]
    fields = {
        "model": MODEL,
        "messages": messages,
        "response_format": {"type": "json_object"},
        "max_tokens": 150,
    }
    answer = httpx.post(f"{hybrid}/v1/chat/completions", json={**fields, "seed": 3}, timeout=100).json()
    (first,) = answer["choices"]
    assert first["finish_reason"] == "stop"
    assert isinstance(json.loads(first["message"]["content"]), dict)


@pytest.mark.case("API-37")
@pytest.mark.case("SC-10")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "foo"}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"regex": "(a{1,1000}){1,1000}"}}, "structured_outputs.regex"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_alike(
    hybrid: str, cluster: Cluster, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        for url in (hybrid, cluster.router):
            request = {"prompt": "x", "stream": stream, **fields}
            refused = httpx.post(f"{url}/v1/completions", json=request, timeout=30)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
