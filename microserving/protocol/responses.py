"""OpenAI's answers, as bytes. Streamed chunks take a fast path: the constant head is encoded once per request.

Owns what every answer has (head, usage block), the shapes of `text_completion` and the model list; ``chat_responses``
has the chat's. Does not know where text comes from.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, Literal

import msgspec
from pydantic import BaseModel

from microserving.protocol.generation import FinishReason, GenerationChunk

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_encode: Final = msgspec.json.encode
"""For what holds no float: it would write null for NaN."""


def dump(value: Any) -> bytes:
    """Compact JSON; refuses NaN and infinities (ValueError) rather than write what no parser reads."""
    return _ENCODER.encode(value).encode("utf-8")


@dataclass(slots=True)
class Usage:
    """What one request used. prompt_tokens: each prompt counted once. choices: of each prompt (n).

    cached_tokens: of ``prompt_tokens``, those whose K/V came out of a prefix cache for the first choice of their prompt
    (the others find what that one left).
    """

    prompt_tokens: int
    choices: int = 1
    completion_tokens: int = 0
    cached_tokens: int = 0

    def count(self, index: int, last: GenerationChunk) -> None:
        """Choice ``index`` has ended with the chunk ``last``."""
        self.completion_tokens += last.completion_tokens
        if index % self.choices == 0:
            self.cached_tokens += last.cached_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """One choice of an answer that is not streamed."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


class AnswerShape(ABC):
    """One request's answers: its id, creation time and model name are constant over all of its chunks.

    model: as the request named it. token_ids: whether choices carry `token_ids` (`return_token_ids`).
    """

    id_prefix: ClassVar[str]
    _object: ClassVar[str]
    _chunk_object: ClassVar[str]
    _around_text: ClassVar[tuple[bytes, bytes]]
    """What is before and behind a text in a choice of a stream."""

    def __init__(
        self, *, request_id: str, created: int, model: str, include_usage: bool, token_ids: bool
    ) -> None:
        self._constants: dict[str, Any] = {
            "id": f"{self.id_prefix}-{request_id}",
            "created": created,
            "model": model,
        }
        self._token_ids = token_ids
        self._include_usage = include_usage
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self._tail = b',"usage":null}' if include_usage else b"}"

    @cached_property
    def _head(self) -> bytes:
        return _encode({**self._constants, "object": self._chunk_object})[:-1] + b',"choices":'

    def chunks(self, index: int, chunk: GenerationChunk, *, first: bool) -> list[bytes]:
        """The stream chunks for one piece of choice ``index``; ``first``: nothing of this choice was sent before.

        Empty when the piece shows nothing (no text, no finish reason, token ids not asked for).
        """
        choices = self._choices(index, chunk, first)
        return [b"%b[%b]%b" % (self._head, _encode(choice), self._tail) for choice in choices]

    def next_event(self, index: int, chunk: GenerationChunk) -> bytes | None:
        """The event of a piece in the middle of choice ``index``, as it nearly always is; None when it is another one,
        which needs ``chunks``."""
        if not chunk.text or chunk.finish_reason is not None or self._token_ids:
            return None
        parts = self._around.get(index)
        if parts is None:
            parts = self._around[index] = self._middle(index)
        return b"%b%b%b" % (parts[0], _encode(chunk.text), parts[1])

    def _middle(self, index: int) -> tuple[bytes, bytes]:
        """What is before and behind the text."""
        text, behind = self._around_text
        before = b'data: %b[{"index":%d,%b' % (self._head, index, text)
        return before, b'%b,"logprobs":null,"finish_reason":null}]%b\n\n' % (behind, self._tail)

    def usage_chunk(self, usage: Usage) -> bytes | None:
        """The one usage chunk, which goes last; None when it was not asked for."""
        if not self._include_usage:
            return None
        return self._head + b'[],"usage":' + dump(usage.body()) + b"}"

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole answer of a request that is not streamed."""
        return _encode(
            {
                **self._constants,
                "object": self._object,
                "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
                "usage": usage.body(),
            }
        )

    @abstractmethod
    def _choices(self, index: int, chunk: GenerationChunk, first: bool) -> list[dict[str, Any]]:
        """The `choices` entries that show ``chunk``, each of a stream chunk of its own; see ``chunks``."""

    @abstractmethod
    def _whole_choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        """The `choices` entry of an answer that is not streamed."""

    def _shows(self, chunk: GenerationChunk) -> bool:
        return bool(chunk.text) or (self._token_ids and bool(chunk.token_ids))

    def _with_ids(self, choice: dict[str, Any], token_ids: tuple[int, ...]) -> dict[str, Any]:
        if self._token_ids:
            choice["token_ids"] = list(token_ids)
        return choice


class CompletionShape(AnswerShape):
    """`text_completion`, whole and streamed."""

    id_prefix = "cmpl"
    _object = _chunk_object = "text_completion"
    _around_text = (b'"text":', b"")

    def _choices(self, index: int, chunk: GenerationChunk, first: bool) -> list[dict[str, Any]]:  # noqa: ARG002 - a chat needs it
        if not self._shows(chunk) and chunk.finish_reason is None:
            return []
        choice = {"index": index, "text": chunk.text, "logprobs": None, "finish_reason": chunk.finish_reason}
        return [self._with_ids(choice, chunk.token_ids)]

    def _whole_choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        shown = {"index": index, "text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason}
        return self._with_ids(shown, choice.token_ids)


class ModelCard(BaseModel):
    """One entry of `/v1/models`; `max_model_len` is vLLM's name for the context limit."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """GET `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Status(BaseModel):
    """GET `/health` and `/ready`, when all is well; else they answer with an error."""

    status: Literal["ok", "ready"]


class ErrorDetail(BaseModel):
    """param: the field at fault. code: a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer with a status of 400 or more (``errors.error_body`` makes it)."""

    error: ErrorDetail
