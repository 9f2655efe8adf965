"""The request body of `/v1/chat/completions`, field by field.

Owns names, types and ranges of the fields that only a chat has; ``chat_messages`` and ``chat_tools`` have the messages
and the tools. It does not know the model or its template.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from pydantic import Field, PlainValidator, ValidationInfo, field_validator

from microserving.protocol.body import invalid
from microserving.protocol.chat_messages import MAX_MESSAGES, ChatMessage
from microserving.protocol.chat_tools import Tool, ToolChoice, Tools
from microserving.protocol.logprobs import MAX_LOGPROBS
from microserving.protocol.openai import INT32_MAX, GenerationFields, no_longer_than

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


def _functions(value: Any, info: ValidationInfo) -> Any:
    """The fields of 2023: off values only."""
    if value not in ([], "none", "auto"):
        name = "tools" if info.field_name == "functions" else "tool_choice"
        raise invalid(f"is not supported; use {name}")
    return value


Deprecated = Annotated[Any, PlainValidator(_functions, json_schema_input_type=Any)]


class ChatCompletionRequest(GenerationFields):
    """`/v1/chat/completions`.

    continue_final_message, add_generation_prompt, chat_template_kwargs: as vLLM has them; the first two exclude each
    other, and without either the prompt ends where the assistant's answer begins.
    """

    messages: Annotated[list[ChatMessage], no_longer_than(MAX_MESSAGES)] = Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    functions: Deprecated = None
    function_call: Deprecated = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[
        dict[str, Any], PlainValidator(_template_variables, json_schema_input_type=dict[str, Any])
    ] = Field(default_factory=dict)

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top is not None and not info.data.get("logprobs"):
            raise invalid("needs logprobs to be true")
        return top

    @field_validator("tool_choice")
    @classmethod
    def _a_tool_there_is(cls, choice: str | dict[str, str], info: ValidationInfo) -> str | dict[str, str]:
        names = [tool.name for tool in info.data.get("tools", ())]
        if choice == "required" and not names:
            raise invalid("needs tools")
        if isinstance(choice, dict) and choice["name"] not in names:
            raise invalid("names a function that is not in tools")
        return choice

    @field_validator("continue_final_message")
    @classmethod
    def _one_of_both(cls, continues: bool, info: ValidationInfo) -> bool:
        if continues and info.data.get("add_generation_prompt"):
            raise invalid("cannot be set together with add_generation_prompt")
        messages = info.data.get("messages")
        if continues and messages and messages[-1].role != "assistant":
            raise invalid("the last message must be the assistant's")
        return continues

    @classmethod
    def ignored_within(cls, body: dict[str, Any]) -> list[str]:
        """The fields of messages that are ignored, as `messages.name`."""
        messages = body.get("messages")
        if not isinstance(messages, list):
            return []
        names = [name for message in messages for name in ChatMessage.ignored(message)]
        return [f"messages.{name}" for name in dict.fromkeys(names)]

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, else its older name `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def shown_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_chars(self) -> int:
        """About how long the rendered chat is."""
        return len(str(self.offered_tools)) + sum(
            len(str(message.for_template())) for message in self.messages
        )

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
        if self.add_generation_prompt is False:
            options["add_generation_prompt"] = False
        if self.continue_final_message:
            options["continue_final_message"] = True
        if self.chat_template_kwargs:
            options["variables"] = self.chat_template_kwargs
        return options

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as a chat template reads them."""
        return [message.for_template() for message in self.messages]
