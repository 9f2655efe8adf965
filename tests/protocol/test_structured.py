"""What binds an output's form, as clients write it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from microserving.errors import InvalidRequest
from microserving.protocol.body import validate
from microserving.protocol.chat import ChatCompletionRequest
from microserving.protocol.generation import GenerationRequest, Grammar, SamplingParams, StopParams
from microserving.protocol.microserving import StartGenerateRequest, completion_body
from microserving.protocol.openai import CompletionRequest

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": None}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":null}}}'


def bound(**fields: Any) -> tuple[Grammar, str] | None:
    message = {"role": "user", "content": "x"}
    chat = validate(ChatCompletionRequest, {"messages": [message], **fields}).constraint()
    assert validate(CompletionRequest, {"prompt": "x", **fields}).constraint() == chat
    return chat


@pytest.mark.case("API-37")
@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"type": "json_schema", "schema": {}}, "response_format.json_schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "n" * 65, "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": []}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": "yes"}},
            "response_format.json_schema.strict",
        ),
        ({"type": "json_schema", "json_schema": "n"}, "response_format.json_schema"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": []}, "response_format.type"),
        ({"type": "regex"}, "response_format.pattern"),
        ({"type": "grammar", "grammar": ""}, "response_format.grammar"),
        ({}, "response_format.type"),
        ("json_object", "response_format"),
        ([], "response_format"),
    ],
)  # fmt: skip
def test_a_malformed_response_format_is_refused(value: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        bound(response_format=value)
    assert refused.value.param == param
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, (Grammar("json_object"), "response_format.type")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
            (Grammar("json_schema", TEXT), "response_format.json_schema.schema"),
        ),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, (Grammar("regex", "a+"), "response_format.pattern")),
        ({"structured_outputs": {"json": SCHEMA}}, (Grammar("json_schema", TEXT), "structured_outputs.json")),
        ({"structured_outputs": {"json_object": True}}, (Grammar("json_object"), "structured_outputs.json_object")),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"guided_json": json.dumps(SCHEMA)}, (Grammar("json_schema", TEXT), "guided_json")),
        ({"guided_regex": "a|b"}, (Grammar("regex", "a|b"), "guided_regex")),
        ({"guided_choice": ["yes", 'n"o']}, (Grammar("lark", 'start: "yes" | "n\\"o"'), "guided_choice")),
        ({"guided_grammar": "start: A"}, (Grammar("lark", "start: A"), "guided_grammar")),
        ({"grammar": "root ::= a"}, (Grammar("lark", "root ::= a"), "grammar")),
        ({"regex": "a", "response_format": {"type": "text"}}, (Grammar("regex", "a"), "regex")),
    ],
)  # fmt: skip
def test_every_way_to_say_it(fields: dict[str, Any], expected: tuple[Grammar, str] | None) -> None:
    """The order of a schema's properties is kept: outputs have it."""
    assert bound(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"guided_choice": ["a"] * 1001}, "guided_choice"),
        ({"guided_regex": "a" * 16_385}, "guided_regex"),
        ({"guided_grammar": "a" * 131_073}, "guided_grammar"),
        ({"guided_json": {"enum": ["v" * 131_073]}}, "guided_json"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"grammar": {"kind": "regex", "text": "a"}}, "grammar"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        bound(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "grammar", [Grammar("json_object"), Grammar("json_schema", TEXT), Grammar("regex", "é|\n")]
)
def test_the_router_tells_an_engine_what_it_was_told(grammar: Grammar) -> None:
    request = GenerationRequest("r", (1,), SamplingParams(), StopParams(max_tokens=3), grammar=grammar)
    body = json.loads(json.dumps(completion_body(request, model="m")))
    assert validate(StartGenerateRequest, {**body, "begin": 0}).constraint() == (grammar, "grammar")


def test_a_body_without_one_does_not_grow() -> None:
    request = GenerationRequest("r", (1,), SamplingParams(), StopParams(max_tokens=3))
    assert "grammar" not in completion_body(request, model="m")


@pytest.mark.parametrize("value", [{"kind": "x", "text": ""}, {"text": "a"}, {"kind": "regex", "text": 5}, 5])
def test_a_wrong_grammar_between_router_and_engine_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(StartGenerateRequest, {"prompt": "x", "begin": 0, "grammar": value})
    assert refused.value.param == "grammar"
