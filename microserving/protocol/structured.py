"""The fields that bind an output's form: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`.

Owns their names and rules, and what they become: a ``Grammar``. Whether that can be compiled is not known here.
Of all of them a request may have one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator, ValidationInfo, field_validator

from microserving.errors import InvalidRequest
from microserving.protocol.body import WireModel, invalid, parse_object
from microserving.protocol.generation import Grammar

MAX_GRAMMAR_BYTES: Final = 131_072
MAX_REGEX_BYTES: Final = 16_384
MAX_CHOICES: Final = 1_000
MAX_SCHEMA_NAME_CHARS: Final = 64
"""OpenAI's."""
JSON_OBJECT: Final = Grammar("json_object")


def _text(value: Any, limit: int = MAX_GRAMMAR_BYTES) -> str:
    if not isinstance(value, str) or not value:
        raise invalid("must be a non-empty string")
    if len(value.encode(errors="replace")) > limit:
        raise invalid(f"must not have more than {limit} bytes")
    return value


def _schema(value: Any) -> Grammar:
    """A JSON Schema: an object, or its text (vLLM)."""
    if isinstance(value, str):
        try:
            value = parse_object(_text(value).encode())
        except InvalidRequest as error:
            raise invalid(error.message.replace("the body", "the schema")[:200]) from None
    if not isinstance(value, dict):
        raise invalid("must be a JSON Schema, which is an object")
    return Grammar("json_schema", _text(json.dumps(value, ensure_ascii=False, separators=(",", ":"))))


def _regex(value: Any) -> Grammar:
    return Grammar("regex", _text(value, MAX_REGEX_BYTES))


def _lark(value: Any) -> Grammar:
    """In Lark, or in GBNF (``root ::= ...``)."""
    return Grammar("lark", _text(value))


def _choice(value: Any) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise invalid("must be a list of non-empty strings")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise invalid(f"must have 1 to {MAX_CHOICES} items")
    return Grammar("lark", _text("start: " + " | ".join(map(json.dumps, value))))


def _any_object(value: Any) -> Grammar | None:
    if type(value) is not bool:
        raise invalid("must be true or false")
    return JSON_OBJECT if value else None


def _never(value: Any) -> None:
    if value is not False:
        raise invalid("is not supported")


SchemaField = Annotated[Grammar | None, PlainValidator(_schema, json_schema_input_type=dict[str, Any] | str)]
RegexField = Annotated[Grammar | None, PlainValidator(_regex, json_schema_input_type=str)]
LarkField = Annotated[Grammar | None, PlainValidator(_lark, json_schema_input_type=str)]
ChoiceField = Annotated[Grammar | None, PlainValidator(_choice, json_schema_input_type=list[str])]
ObjectField = Annotated[Grammar | None, PlainValidator(_any_object, json_schema_input_type=bool)]
Never = Annotated[None, PlainValidator(_never, json_schema_input_type=Literal[False])]


class JsonSchemaFormat(WireModel):
    """`response_format.json_schema`. strict makes no difference: every schema is enforced, to the letter or not at all."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_NAME_CHARS, pattern=r"^[a-zA-Z0-9_-]+$")]
    schema_: Annotated[Grammar, PlainValidator(_schema, json_schema_input_type=dict[str, Any])] = Field(
        alias="schema"
    )
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(WireModel):
    """OpenAI's three types, and two that others have: `{"type": "regex", "pattern"}`, `{"type": "grammar", "grammar"}`."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchemaFormat | None = Field(None, validate_default=True)
    pattern: RegexField = Field(None, validate_default=False)
    grammar: LarkField = None

    @field_validator("json_schema")
    @classmethod
    def _has_schema(cls, value: JsonSchemaFormat | None, info: ValidationInfo) -> JsonSchemaFormat | None:
        if value is None and info.data.get("type") == "json_schema":
            raise invalid("is needed with the type json_schema: it holds the name and the schema")
        return value

    def constraint(self) -> tuple[Grammar, str] | None:
        """With the path of the field within this one. Raises InvalidRequest."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JSON_OBJECT, "type"
        if self.json_schema is not None and self.type == "json_schema":
            return self.json_schema.schema_, "json_schema.schema"
        name, grammar = ("pattern", self.pattern) if self.type == "regex" else ("grammar", self.grammar)
        if grammar is None:
            param = f"response_format.{name}"
            raise InvalidRequest(f"{param} is needed with the type {self.type}", param=param)
        return grammar, name


class StructuredOutputs(WireModel):
    """vLLM's `structured_outputs`: one of the first five."""

    json_: SchemaField = Field(None, alias="json")
    regex: RegexField = None
    choice: ChoiceField = None
    grammar: LarkField = None
    json_object: ObjectField = None
    structural_tag: Never = None
    disable_any_whitespace: Never = None
    whitespace_pattern: Never = None


class StructuredFields(WireModel):
    """The fields, as a part of every request that generates."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaField = None
    guided_regex: RegexField = None
    guided_choice: ChoiceField = None
    guided_grammar: LarkField = None
    grammar: LarkField = None
    regex: RegexField = None

    def constraint(self) -> tuple[Grammar, str] | None:
        """What binds the output, and the field that says so; None when nothing does. Raises InvalidRequest."""
        found = list(self._constraints())
        if len(found) > 1:
            param = found[1][1]
            raise InvalidRequest(f"{param} and {found[0][1]} cannot be combined", param=param)
        return found[0] if found else None

    def _constraints(self) -> Iterable[tuple[Grammar, str]]:
        if self.response_format is not None and (found := self.response_format.constraint()) is not None:
            yield found[0], f"response_format.{found[1]}"
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar", "regex"):
            if (grammar := getattr(self, name)) is not None:
                yield grammar, name
        nested = self.structured_outputs
        if nested is not None:
            found_in = [
                (name, getattr(nested, name))
                for name in ("json_", "regex", "choice", "grammar", "json_object")
            ]
            yield from (
                (grammar, f"structured_outputs.{name.rstrip('_')}")
                for name, grammar in found_in
                if grammar is not None
            )


def _wire_grammar(value: Any) -> Grammar:
    if isinstance(value, str):
        return _lark(value)
    if not isinstance(value, dict):
        raise invalid('must be {"kind": ..., "text": ...} or a string')
    kind, text = value.get("kind"), value.get("text", "")
    if kind not in ("json_schema", "json_object", "regex", "lark"):
        raise invalid("has a kind that is not json_schema, json_object, regex or lark")
    if not isinstance(text, str) or len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise invalid(f"must have a text of at most {MAX_GRAMMAR_BYTES} bytes")
    return Grammar(kind, text)


WireGrammar = Annotated[
    Grammar | None, PlainValidator(_wire_grammar, json_schema_input_type=dict[str, str] | str)
]
"""As the router tells an engine: `{"kind", "text"}`."""


def wire_grammar(grammar: Grammar | None) -> dict[str, str] | None:
    """The inverse of ``WireGrammar``."""
    return None if grammar is None else {"kind": grammar.kind, "text": grammar.text}
