"""The items of `input`, and the messages of a chat that they are.

Owns which item holds what: messages, thoughts, calls of functions and their outputs, in the form in which an answer's
`output` has them, so that it can be sent back as it is. Items of tools that OpenAI hosts are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator, ValidationInfo

from microserving.protocol.body import WireModel, invalid
from microserving.protocol.chat_messages import ChatMessage

MAX_NAME_CHARS: Final = 256
_TYPES: Final = ("message", "function_call", "function_call_output", "reasoning")
_ROLES: Final = ("system", "developer", "user", "assistant")
_PARTS: Final = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a message's part -> its field that holds the text."""
_USED: Final = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"content", "summary"},
}
_OF_OUTPUTS: Final = {"type", "id", "status"}
"""What every item of an answer has; it says nothing to the model."""


def _type(value: Any) -> str:
    if value not in _TYPES:
        raise invalid(f"must be one of {', '.join(_TYPES)}; other items are not supported")
    return str(value)


def _role(value: Any, info: ValidationInfo) -> str | None:
    if not _uses(info):
        return None
    if value not in _ROLES:
        raise invalid(f"must be one of {', '.join(_ROLES)}")
    return str(value)


def _content(value: Any, info: ValidationInfo) -> str:
    """A message's text, or the thoughts of which an answer has told the text."""
    if not _uses(info):
        return ""
    if info.data["type"] == "reasoning":
        return _joined(value or [], {"reasoning_text": "text"})
    return _text(value)


def _summary(value: Any, info: ValidationInfo) -> str:
    return _joined(value or [], {"summary_text": "text"}) if _uses(info) else ""


def _output(value: Any, info: ValidationInfo) -> str:
    return _text(value) if _uses(info) else ""


def _named(value: Any, info: ValidationInfo) -> str:
    if not _uses(info):
        return ""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARS:
        raise invalid(f"must be a string of 1 to {MAX_NAME_CHARS} characters")
    return value


def _arguments(value: Any, info: ValidationInfo) -> str:
    if not _uses(info):
        return ""
    if not isinstance(value, str):
        raise invalid("must be JSON as a string")
    return value


def _uses(info: ValidationInfo) -> bool:
    """Whether the item's type has the field. A type that was refused has none: one error is told."""
    return info.field_name in _USED.get(info.data.get("type", ""), ())


def _text(value: Any) -> str:
    """A string, or parts of text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise invalid("must be a string or a non-empty list of text parts")
    return _joined(value, _PARTS)


def _joined(parts: Any, kinds: dict[str, str]) -> str:
    """The texts of ``parts``, each of a type in ``kinds``, which says the field that holds it."""
    if not isinstance(parts, list):
        raise invalid("must be a list of text parts")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kinds[kind]) if isinstance(kind, str) and kind in kinds else None
        if not isinstance(text, str):
            shown = next(iter(kinds))
            raise invalid(
                f'every part must be {{"type": "{shown}", "text": ...}}; other kinds are not supported'
            )
        texts.append(text)
    return "".join(texts)


_Parts = list[dict[str, Any]]


class InputItem(WireModel):
    """One item: the type says which of the other fields it has. Those are never None or missing then, texts joined."""

    type: Annotated[
        str,
        PlainValidator(
            _type,
            json_schema_input_type=Literal["message", "function_call", "function_call_output", "reasoning"],
        ),
    ] = "message"
    role: Annotated[
        str | None,
        PlainValidator(_role, json_schema_input_type=Literal["system", "developer", "user", "assistant"]),
    ] = Field(None, validate_default=True)
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=str | _Parts)] = Field(
        None, validate_default=True
    )
    summary: Annotated[str, PlainValidator(_summary, json_schema_input_type=_Parts)] = ""
    call_id: Annotated[str, PlainValidator(_named, json_schema_input_type=str)] = Field(
        "", validate_default=True
    )
    name: Annotated[str, PlainValidator(_named, json_schema_input_type=str)] = Field(
        "", validate_default=True
    )
    arguments: Annotated[str, PlainValidator(_arguments, json_schema_input_type=str)] = "{}"
    output: Annotated[str, PlainValidator(_output, json_schema_input_type=str | _Parts)] = Field(
        None, validate_default=True
    )

    @classmethod
    def ignored(cls, item: Any) -> Iterable[str]:
        """The names in an item (as it came) that have no effect."""
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in _USED:
            return []
        known = _USED[kind] | _OF_OUTPUTS
        return [name for name, value in item.items() if name not in known and value is not None]

    @property
    def by_assistant(self) -> bool:
        return self.role == "assistant" or self.type in ("function_call", "reasoning")


def chat_messages(items: Iterable[InputItem]) -> list[ChatMessage]:
    """What the assistant thought, said and called before it was somebody else's turn is one message."""
    messages: list[ChatMessage | _Turn] = []
    for item in items:
        if not item.by_assistant:
            messages.append(_others_message(item))
            continue
        turn = messages[-1] if messages else None
        if not isinstance(turn, _Turn) or turn.is_over_before(item):
            turn = _Turn()
            messages.append(turn)
        turn.add(item)
    return [each.message() if isinstance(each, _Turn) else each for each in messages]


def _others_message(item: InputItem) -> ChatMessage:
    # Not validated: the item has been.
    if item.type == "function_call_output":
        return ChatMessage.model_construct(role="tool", tool_call_id=item.call_id, content=item.output)
    return ChatMessage.model_construct(role=item.role, content=item.content)


@dataclass(slots=True)
class _Turn:
    """One message of the assistant."""

    thoughts: str = ""
    text: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    def is_over_before(self, item: InputItem) -> bool:
        """Two texts in a row are two messages. Around a call they are one, as a chat's answer has them."""
        return item.type != "function_call" and self.text is not None and not self.calls

    def add(self, item: InputItem) -> None:
        if item.type == "reasoning":
            self.thoughts += item.content or item.summary
        elif item.type == "message":
            self.text = (self.text or "") + item.content
        else:
            function = {"name": item.name, "arguments": item.arguments}
            self.calls.append({"id": item.call_id, "type": "function", "function": function})

    def message(self) -> ChatMessage:
        return ChatMessage.model_construct(
            role="assistant",
            content=self.text if self.calls else self.text or "",
            tool_calls=self.calls,
            reasoning_content=self.thoughts or None,
        )
