"""The request body of `/v1/chat/completions`, field by field: messages, tools.

Owns names, types and ranges of the fields that only a chat has. It does not know the model or its template.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator, ValidationInfo

from microserving.protocol.body import WireModel, invalid
from microserving.protocol.openai import INT32_MAX, GenerationFields, Unsupported, no_longer_than

MAX_MESSAGES: Final = 4096
_ROLES: Final = ("system", "developer", "user", "assistant")


def _content(value: Any) -> str:
    """Text, or a list of text parts, joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise invalid("must be a string or a non-empty list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid('every part must be {"type": "text", "text": ...}; other kinds are not supported')
        texts.append(part["text"])
    return "".join(texts)


def _role(value: Any) -> str:
    if value not in _ROLES:
        raise invalid(f"must be one of {', '.join(_ROLES)}")
    return "system" if value == "developer" else str(value)


def _no_tool_calls(value: Any) -> Any:
    if value != []:
        raise invalid("tool calls are not supported")
    return value


class ChatMessage(WireModel):
    """One message. `developer` is mapped to `system`; a role that templates may drop silently is refused."""

    role: Annotated[
        str,
        PlainValidator(_role, json_schema_input_type=Literal["system", "developer", "user", "assistant"]),
    ]
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[dict[str, Any]])]
    tool_calls: Annotated[Any, PlainValidator(_no_tool_calls, json_schema_input_type=list[Any])] = None
    function_call: Unsupported = None


def _tool_choice(value: Any) -> str:
    if value not in ("none", "auto"):
        raise invalid('only "none" and "auto" are supported')
    return str(value)


def _tools(value: Any, info: ValidationInfo) -> Any:
    """Tools have no effect with the choice "none"; anything else would need tool calls, which we do not have."""
    choice = "function_call" if info.field_name == "functions" else "tool_choice"
    if not isinstance(value, list):
        raise invalid("must be a list")
    if value and info.data.get(choice) != "none":
        raise invalid(f'is not supported (an empty list is, and any list with {choice} "none")')
    return value


ToolChoice = Annotated[str, PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto"])]
Tools = Annotated[Any, PlainValidator(_tools, json_schema_input_type=list[Any])]


class ChatCompletionRequest(GenerationFields):
    """`/v1/chat/completions`. Tools are refused unless `tool_choice` is "none" (they then have no effect)."""

    messages: Annotated[list[ChatMessage], no_longer_than(MAX_MESSAGES)] = Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: Unsupported = None
    top_logprobs: Unsupported = None
    tool_choice: ToolChoice = "auto"
    tools: Tools = None
    function_call: ToolChoice = "auto"
    functions: Tools = None

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, else its older name `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_messages(self) -> list[dict[str, str]]:
        """The messages as a chat template reads them."""
        return [{"role": message.role, "content": message.content} for message in self.messages]
