"""What a request says to a chat model, whichever API it comes by: tools, which of them may be called, template variables.

Owns these fields and what follows from them. Each API has its own form of the messages (``chat``, ``responses_api``).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import Field, PlainValidator, ValidationInfo, field_validator

from microserving.protocol.body import invalid
from microserving.protocol.chat_messages import ChatMessage
from microserving.protocol.chat_tools import Tool, ToolChoice, Tools
from microserving.protocol.openai import GenerationFields

MAX_TEMPLATE_VARIABLES: Final = 64
MAX_TEMPLATE_VARIABLES_CHARS: Final = 65_536


def _template_variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid("must be an object")
    if len(value) > MAX_TEMPLATE_VARIABLES:
        raise invalid(f"at most {MAX_TEMPLATE_VARIABLES} entries")
    if not all(name.isidentifier() for name in value):
        raise invalid("every key must be a name that a template can use")
    if len(json.dumps(value)) > MAX_TEMPLATE_VARIABLES_CHARS:
        raise invalid(f"at most {MAX_TEMPLATE_VARIABLES_CHARS} characters of JSON")
    return value


class ChatFields(GenerationFields):
    """chat_template_kwargs: as vLLM has it."""

    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[
        dict[str, Any], PlainValidator(_template_variables, json_schema_input_type=dict[str, Any])
    ] = Field(default_factory=dict)

    @field_validator("tool_choice")
    @classmethod
    def _a_tool_there_is(cls, choice: str | dict[str, str], info: ValidationInfo) -> str | dict[str, str]:
        names = [tool.name for tool in info.data.get("tools", ())]
        if choice == "required" and not names:
            raise invalid("needs tools")
        if isinstance(choice, dict) and choice["name"] not in names:
            raise invalid("names a function that is not in tools")
        return choice

    @property
    @abstractmethod
    def chat(self) -> Sequence[ChatMessage]:
        """The messages, in order."""

    @property
    def token_limit(self) -> int | None:
        """How many tokens the answer may have; None: all that fit."""
        return self.max_tokens

    @property
    def begun_answer(self) -> str | None:
        """The text of the chat's last message, when the answer goes on with it; None when it is a message of its own."""
        return None

    @property
    def prompt_chars(self) -> int:
        """About how long the rendered chat is."""
        return len(str(self.offered_tools)) + sum(len(str(message.for_template())) for message in self.chat)

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of: none with the choice "none"."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which one must be called; none where the model may answer with text."""
        if isinstance(self.tool_choice, dict):
            return [tool for tool in self.tools if tool.name == self.tool_choice["name"]]
        return self.tools if self.tool_choice == "required" else []

    @property
    def several_calls(self) -> bool:
        """Whether one answer may hold more than one call. A named function is called once."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, dict)

    @property
    def template_options(self) -> dict[str, Any]:
        """The options of ``Tokenizer.render_chat``, where they are not the usual ones."""
        options: dict[str, Any] = {}
        if self.offered_tools:
            options["tools"] = [tool.definition for tool in self.offered_tools]
        if self.chat_template_kwargs:
            options["variables"] = self.chat_template_kwargs
        return options

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as a chat template reads them."""
        return [message.for_template() for message in self.chat]
