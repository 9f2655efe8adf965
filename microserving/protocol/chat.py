"""The request body of `/v1/chat/completions`, field by field.

Owns names, types and ranges of the fields that only this API has; ``chat_fields`` has what a chat model is told in any,
``chat_messages`` the messages. It does not know the model or its template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, ValidationInfo, field_validator

from microserving.protocol.body import invalid
from microserving.protocol.chat_fields import ChatFields
from microserving.protocol.chat_messages import MAX_MESSAGES, ChatMessage
from microserving.protocol.logprobs import MAX_LOGPROBS
from microserving.protocol.openai import INT32_MAX, no_longer_than


def _functions(value: Any, info: ValidationInfo) -> Any:
    """The fields of 2023: off values only."""
    if value not in ([], "none", "auto"):
        name = "tools" if info.field_name == "functions" else "tool_choice"
        raise invalid(f"is not supported; use {name}")
    return value


Deprecated = Annotated[Any, PlainValidator(_functions, json_schema_input_type=Any)]


class ChatCompletionRequest(ChatFields):
    """`/v1/chat/completions`.

    continue_final_message, add_generation_prompt: as vLLM has them; they exclude each other, and without either the
    prompt ends where the assistant's answer begins.
    """

    messages: Annotated[list[ChatMessage], no_longer_than(MAX_MESSAGES)] = Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    functions: Deprecated = None
    function_call: Deprecated = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top is not None and not info.data.get("logprobs"):
            raise invalid("needs logprobs to be true")
        return top

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
    def chat(self) -> Sequence[ChatMessage]:
        return self.messages

    @property
    def begun_answer(self) -> str | None:
        return (self.messages[-1].content or "") if self.continue_final_message else None

    @property
    def template_options(self) -> dict[str, Any]:
        options = super().template_options
        if self.add_generation_prompt is False:
            options["add_generation_prompt"] = False
        if self.continue_final_message:
            options["continue_final_message"] = True
        return options
