"""`/tokenize` and `/detokenize`, as vLLM has them.

Owns the bodies and the answers. Does not know a tokenizer.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainValidator, RootModel

from microserving.protocol.body import WireModel, invalid
from microserving.protocol.chat import ChatCompletionRequest
from microserving.protocol.openai import ModelName, token_ids


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise invalid("must be a list of token ids")
    return token_ids(value) if value else value


class TokenizeTextRequest(WireModel):
    """A text. add_special_tokens: with the model's start token, as a completion's prompt has it."""

    model: ModelName | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatCompletionRequest):
    """A chat: the body of `/v1/chat/completions` as it is. What only concerns the answer has no effect."""

    add_special_tokens: bool = False
    """Without effect: the template says where the special tokens of a chat are."""
    return_token_strs: bool = False


class TokenizeRequest(RootModel[TokenizeTextRequest | TokenizeChatRequest]):
    """`/tokenize`: a chat when it has `messages`."""


class TokenizeAnswer(BaseModel):
    """count: of tokens. token_strs: as the vocabulary has them, when they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(WireModel):
    """`/detokenize`: at most as many tokens as the context has."""

    model: ModelName | None = None
    tokens: Annotated[
        list[int], PlainValidator(_ids, json_schema_input_type=list[Annotated[int, Field(ge=0)]])
    ]


class DetokenizeAnswer(BaseModel):
    """prompt: the text, with the texts of special tokens."""

    prompt: str
