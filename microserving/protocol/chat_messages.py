"""The messages of a chat request: which role may hold what.

Owns that every message has a text, or calls that stand for it. The template decides which roles a model knows, and
whether their order is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator, ValidationInfo

from microserving.protocol.body import WireModel, invalid
from microserving.protocol.chat_tools import MAX_TOOLS

MAX_MESSAGES: Final = 4096
_MAX_ID_CHARS: Final = 256
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def _role(value: Any) -> str:
    if value not in _ROLES:
        raise invalid(f"must be one of {', '.join(_ROLES)}")
    return str(value)


def _content(value: Any, info: ValidationInfo) -> str | None:
    """Text, or a list of text parts, joined. Only an assistant who calls tools may say nothing."""
    if isinstance(value, str):
        return value
    if value is None and info.data.get("tool_calls"):
        return None
    if not isinstance(value, list) or not value:
        raise invalid("must be a string or a non-empty list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise invalid('every part must be {"type": "text", "text": ...}; other kinds are not supported')
        texts.append(text)
    return "".join(texts)


def _call(value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise invalid('every call must be {"id": ..., "type": "function", "function": {...}}')
    name, arguments, call_id = function.get("name"), function.get("arguments", "{}"), value.get("id", "")
    if not isinstance(name, str) or not name:
        raise invalid("every call must name its function")
    if not isinstance(arguments, str | dict):
        raise invalid("the arguments of a call must be JSON as a string")
    if not isinstance(call_id, str) or len(call_id) > _MAX_ID_CHARS:
        raise invalid(f"the id of a call must be a string of at most {_MAX_ID_CHARS} characters")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_calls(value: Any, info: ValidationInfo) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid(f"must be a list of at most {MAX_TOOLS} calls")
    if value and info.data.get("role") != "assistant":
        raise invalid("only the assistant calls tools")
    return [_call(call) for call in value]


def _tool_call_id(value: Any, info: ValidationInfo) -> str | None:
    if value is None and info.data.get("role") != "tool":
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_ID_CHARS:
        raise invalid(f"must be a string of 1 to {_MAX_ID_CHARS} characters")
    return value


def _no_function_call(_: Any) -> Any:
    raise invalid("is not supported; use tool_calls")


class ChatMessage(WireModel):
    """One message. content None: the assistant only called tools. name: a tool's; of others it is ignored."""

    role: Annotated[
        str,
        PlainValidator(
            _role, json_schema_input_type=Literal["system", "developer", "user", "assistant", "tool"]
        ),
    ]
    tool_calls: Annotated[
        list[dict[str, Any]], PlainValidator(_tool_calls, json_schema_input_type=list[dict[str, Any]])
    ] = Field(default_factory=list)
    content: Annotated[
        str | None, PlainValidator(_content, json_schema_input_type=str | list[dict[str, Any]] | None)
    ] = Field(None, validate_default=True)
    tool_call_id: Annotated[str | None, PlainValidator(_tool_call_id, json_schema_input_type=str | None)] = (
        Field(None, validate_default=True)
    )
    name: Annotated[str, Field(max_length=_MAX_ID_CHARS)] | None = None
    reasoning_content: str | None = None
    """What the assistant thought, for templates that show it; others leave earlier thoughts out."""
    function_call: Annotated[Any, PlainValidator(_no_function_call, json_schema_input_type=None)] = None

    @classmethod
    def ignored(cls, message: Any) -> Iterable[str]:
        """The names in a message (as it came) that have no effect."""
        if not isinstance(message, dict):
            return []
        known = cls.model_fields if message.get("role") == "tool" else cls.model_fields.keys() - {"name"}
        return [name for name, value in message.items() if name not in known and value is not None]

    @property
    def chars(self) -> int:
        """About how long it is in the prompt."""
        calls = len(str(self.tool_calls)) if self.tool_calls else 0
        return len(self.content or "") + len(self.reasoning_content or "") + calls

    def for_template(self) -> dict[str, Any]:
        """As a chat template reads it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
            if self.name:
                message["name"] = self.name
        if self.role == "assistant" and self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        return message
