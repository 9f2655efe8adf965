"""The request body of `/v1/responses`, field by field, and how it says what the chat's says (``ChatFields``).

Owns the names and forms that only this API has. Nothing is stored, so what refers to an earlier answer is refused. Fields
that OpenAI has for other things (`include`, `reasoning`, `truncation`) are ignored and named.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from microserving.errors import InvalidRequest
from microserving.protocol.body import WireModel, invalid
from microserving.protocol.chat_fields import ChatFields
from microserving.protocol.chat_messages import MAX_MESSAGES, ChatMessage
from microserving.protocol.chat_tools import ToolChoice, Tools
from microserving.protocol.generation import Grammar
from microserving.protocol.openai import INT32_MAX, no_longer_than
from microserving.protocol.responses_api.items import InputItem, chat_messages
from microserving.protocol.structured import JSON_OBJECT, MAX_SCHEMA_NAME_CHARS, SchemaField

_ELSEWHERE: Final = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
    "previous_response_id": "input with the earlier items: no answer is stored",
    "conversation": "input with the earlier items: no conversation is stored",
    "prompt": "instructions and input: no prompt is stored",
}
"""Fields that are refused -> what does their work."""


def _refused(_: Any, info: ValidationInfo) -> None:
    raise invalid(f"is not supported; use {_ELSEWHERE[info.field_name or '']}")


def _never(value: Any) -> bool:
    if value is not False:
        raise invalid("is not supported")
    return False


def _items(value: Any) -> Any:
    """A text is the user's."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _tools(value: Any) -> Any:
    """In the chat's form. The fields of a function are in the tool itself here."""
    if not isinstance(value, list):
        raise invalid("must be a list of tools")
    return [_tool(tool) for tool in value]


def _tool(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise invalid("only tools of the type function are supported: none is hosted here")
    return {"type": "function", "function": value}


def _tool_choice(value: Any) -> Any:
    """In the chat's form."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    if (
        not isinstance(value, dict)
        or value.get("type") != "function"
        or not isinstance(value.get("name"), str)
    ):
        raise invalid('must be "none", "auto", "required" or {"type": "function", "name": ...}')
    return {"type": "function", "function": {"name": value["name"]}}


Refused = Annotated[None, PlainValidator(_refused, json_schema_input_type=None)]
Off = Annotated[Literal[False], PlainValidator(_never, json_schema_input_type=Literal[False])]
SchemaName = Annotated[
    str, Field(min_length=1, max_length=MAX_SCHEMA_NAME_CHARS, pattern=r"^[a-zA-Z0-9_-]+$")
]


class TextFormat(WireModel):
    """`text.format`. name, schema: of the type json_schema, which needs both. strict makes no difference."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    schema_: SchemaField = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    def constraint(self) -> tuple[Grammar, str] | None:
        """With the path of the field within this one. Raises InvalidRequest."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return JSON_OBJECT, "type"
        if self.name is None or self.schema_ is None:
            param = f"text.format.{'name' if self.name is None else 'schema'}"
            raise InvalidRequest(f"{param} is needed with the type json_schema", param=param)
        return self.schema_, "schema"

    def echo(self) -> dict[str, Any]:
        """As an answer tells it."""
        if self.type != "json_schema" or self.schema_ is None:
            return {"type": self.type}
        return {
            "type": self.type,
            "name": self.name,
            "schema": json.loads(self.schema_.text),
            "description": self.description,
            "strict": self.strict,
        }


class TextConfig(WireModel):
    format: TextFormat = TextFormat.model_validate({"type": "text"})


class ResponsesRequest(ChatFields):
    """`/v1/responses`. The extensions are the chat's; store: of no effect."""

    input: Annotated[
        list[InputItem],
        no_longer_than(MAX_MESSAGES),
        BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
    ] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    text: TextConfig = TextConfig()
    tools: Annotated[Tools, BeforeValidator(_tools, json_schema_input_type=list[dict[str, Any]])] = Field(
        default_factory=list
    )
    tool_choice: Annotated[
        ToolChoice, BeforeValidator(_tool_choice, json_schema_input_type=str | dict[str, Any])
    ] = "auto"
    store: bool = False
    n: Literal[1] = 1
    background: Off = False
    return_token_ids: Off = False
    max_tokens: Refused = None
    max_completion_tokens: Refused = None
    response_format: Refused = None
    messages: Refused = None
    previous_response_id: Refused = None
    conversation: Refused = None
    prompt: Refused = None

    @classmethod
    def ignored_within(cls, body: dict[str, Any]) -> list[str]:
        """The fields of items and of `text` that are ignored, as `input.name` and `text.name`."""
        items, text = body.get("input"), body.get("text")
        names = (
            [name for item in items for name in InputItem.ignored(item)] if isinstance(items, list) else []
        )
        ignored = [f"input.{name}" for name in dict.fromkeys(names)]
        if isinstance(text, dict):
            ignored += [f"text.{name}" for name in text if name not in TextConfig.model_fields]
        return ignored

    @cached_property
    def chat(self) -> Sequence[ChatMessage]:
        messages = chat_messages(self.input)
        if self.instructions is not None:
            messages.insert(0, ChatMessage.model_construct(role="system", content=self.instructions))
        return messages

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    def _constraints(self) -> Iterable[tuple[Grammar, str]]:
        if (found := self.text.format.constraint()) is not None:
            yield found[0], f"text.format.{found[1]}"
        yield from super()._constraints()

    def echo(self) -> dict[str, Any]:
        """The settings as an answer tells them."""
        choice = self.tool_choice
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": self.temperature,
            "text": {"format": self.text.format.echo()},
            "tool_choice": choice if isinstance(choice, str) else {"type": "function", **choice},
            "tools": [
                {"type": "function", "strict": None, **tool.definition["function"]} for tool in self.tools
            ],
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }
