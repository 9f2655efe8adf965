"""OpenAI's answers, as bytes. Streamed chunks take a fast path: the constant head is encoded once per request.

Owns what a shape is, what answers with choices have (head, usage block), the shapes of `text_completion` and the model
list; ``chat_responses`` has the chat's. Does not know where text comes from.
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

from microserving.errors import MicroservingError, error_body
from microserving.protocol.generation import FinishReason, GenerationChunk, TokenLogprob
from microserving.protocol.logprobs import (
    CompletionLogprobs,
    TokenTexts,
    joined_arrays,
    prompt_logprobs,
    to_wire,
)
from microserving.protocol.sse import DONE_EVENT, encode_event

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_encode: Final = msgspec.json.encode
"""For what holds no float that is not finite: it would write null."""


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
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


def error_event(error: MicroservingError) -> bytes:
    """The event that a stream of choices ends with when it has failed: the body of an error answer."""
    return encode_event(dump(error_body(error)))


class AnswerShape(ABC):
    """How one request is answered: whole (``answer``), or with a stream of events, which are told here as they are sent.
    Holds what a stream has said."""

    @abstractmethod
    def events(self, index: int, chunk: GenerationChunk, *, first: bool) -> bytes:
        """The events of one piece of choice ``index``; ``first``: nothing of this choice was sent before. Empty when the
        piece shows nothing."""

    @abstractmethod
    def next_event(self, index: int, chunk: GenerationChunk) -> bytes | None:
        """The event of a piece in the middle of choice ``index``, as it nearly always is; None when it is another one,
        which needs ``events``."""

    @abstractmethod
    def last_events(self, usage: Usage) -> bytes:
        """The end of a stream in which every choice has ended."""

    def error_event(self, error: MicroservingError) -> bytes:
        """The end of a stream that has begun and cannot go on."""
        return error_event(error)

    @abstractmethod
    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        """The whole answer of a request that is not streamed."""


class ChoicesShape(AnswerShape):
    """Answers with `choices`: their id, creation time and model name are constant over all chunks.

    model: as the request named it. fingerprint: `system_fingerprint`, "" = none. token_ids: whether choices carry
    `token_ids` (`return_token_ids`). logprobs: with how many of the likeliest tokens each token is shown, None = no
    log-probabilities. texts: what tokens stand for, needed when log-probabilities are shown.
    """

    id_prefix: ClassVar[str]
    _object: ClassVar[str]
    _chunk_object: ClassVar[str]
    _around_text: ClassVar[tuple[bytes, bytes]]
    """What is before and behind a text in a choice of a stream."""

    def __init__(
        self,
        *,
        request_id: str,
        created: int,
        model: str,
        include_usage: bool,
        token_ids: bool,
        fingerprint: str = "",
        logprobs: int | None = None,
        texts: TokenTexts | None = None,
    ) -> None:
        self._constants: dict[str, Any] = {
            "id": f"{self.id_prefix}-{request_id}",
            "created": created,
            "model": model,
        }
        if fingerprint:
            self._constants["system_fingerprint"] = fingerprint
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._texts = texts
        self._only_text = not token_ids and logprobs is None
        """Whether a piece in the middle of a choice shows nothing but text."""
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

    def events(self, index: int, chunk: GenerationChunk, *, first: bool) -> bytes:
        return b"".join(map(encode_event, self.chunks(index, chunk, first=first)))

    def next_event(self, index: int, chunk: GenerationChunk) -> bytes | None:
        if not chunk.text or chunk.finish_reason is not None or not self._only_text:
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

    def last_events(self, usage: Usage) -> bytes:
        last = self.usage_chunk(usage)
        return DONE_EVENT if last is None else encode_event(last) + DONE_EVENT

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
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
        told = self._token_ids or self._logprobs is not None
        return bool(chunk.text) or (told and bool(chunk.token_ids))

    def _with_ids(self, choice: dict[str, Any], token_ids: tuple[int, ...]) -> dict[str, Any]:
        if self._token_ids:
            choice["token_ids"] = list(token_ids)
        return choice


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt that its choices begin with."""

    text: str
    token_ids: Sequence[int]


class CompletionShape(ChoicesShape):
    """`text_completion`, whole and streamed.

    echo: the prompts that choices begin with (`echo`), each of ``choices_per_prompt``; none = they do not.
    prompt_logprobs: vLLM's field, with so many of the likeliest tokens; on a stream's first chunk of each choice.
    """

    id_prefix = "cmpl"
    _object = _chunk_object = "text_completion"
    _around_text = (b'"text":', b"")

    def __init__(
        self,
        *,
        echo: Sequence[EchoedPrompt] = (),
        choices_per_prompt: int = 1,
        prompt_logprobs: int | None = None,
        **head: Any,
    ) -> None:
        super().__init__(**head)
        self._echo = echo
        self._choices_per_prompt = choices_per_prompt
        self._prompt_logprobs = prompt_logprobs
        self._arrays: dict[int, CompletionLogprobs] = {}

    def _choices(self, index: int, chunk: GenerationChunk, first: bool) -> list[dict[str, Any]]:
        if not self._shows(chunk) and chunk.finish_reason is None:
            return []
        return [self._entry(index, chunk, first)]

    def _whole_choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        return self._entry(index, choice, first=True)

    def _entry(self, index: int, piece: GenerationChunk | FinishedChoice, first: bool) -> dict[str, Any]:
        """first: of the choice."""
        echo = self._echo[index // self._choices_per_prompt] if first and self._echo else None
        text = piece.text if echo is None else echo.text + piece.text
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": piece.finish_reason}
        self._add_logprobs(choice, index, piece, echo)
        return self._with_ids(choice, piece.token_ids)

    def _add_logprobs(
        self,
        choice: dict[str, Any],
        index: int,
        piece: GenerationChunk | FinishedChoice,
        echo: EchoedPrompt | None,
    ) -> None:
        if self._texts is None:
            return
        if self._prompt_logprobs is not None and piece.prompt_logprobs is not None:
            shown = prompt_logprobs(piece.prompt_logprobs, self._prompt_logprobs, self._texts.token_bytes)
            choice["prompt_logprobs"] = shown
        if self._logprobs is None:
            return
        arrays = self._arrays.get(index)
        if arrays is None:
            start = 0 if echo is None else len(echo.text)
            arrays = self._arrays[index] = CompletionLogprobs(self._logprobs, self._texts, start)
        choice["logprobs"] = arrays.piece(piece.logprobs)
        if echo is not None and piece.prompt_logprobs is not None:
            before = arrays.echo(echo.text, echo.token_ids, piece.prompt_logprobs)
            choice["logprobs"] = joined_arrays([before, choice["logprobs"]])


class VerbShape(CompletionShape):
    """The answer of `start_generate` to a router: log-probabilities with ids (`token_logprobs`, `prompt_token_logprobs`)
    in place of OpenAI's shape, whose texts are ambiguous."""

    def _add_logprobs(
        self,
        choice: dict[str, Any],
        index: int,  # noqa: ARG002 - OpenAI's shape needs it
        piece: GenerationChunk | FinishedChoice,
        echo: EchoedPrompt | None,  # noqa: ARG002 - likewise
    ) -> None:
        if self._logprobs is not None:
            choice["token_logprobs"] = list(map(to_wire, piece.logprobs))
        if piece.prompt_logprobs is not None:
            scores = piece.prompt_logprobs
            choice["prompt_token_logprobs"] = [None if token is None else to_wire(token) for token in scores]


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
