"""The request and answer objects of MLC's router files: the fields of OpenAI's completions that they use.

Mutable, as those files assign to them. Values are not checked again: the front has checked the client's, and the engines
check what a program makes of them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from microserving.program.request import Request
from microserving.protocol.generation import FinishReason, GenerationChunk


class CompletionRequest(BaseModel):
    """One prompt, already tokenised. user: the request id that engines know it by.

    extra fields pass, as in ``CompletionRequest(**other.model_dump(), end=3)``.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | list[int]
    best_of: int = 1
    echo: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: Any = None
    suffix: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    response_format: Any = None
    debug_config: Any = None

    @classmethod
    def of(cls, request: Request) -> CompletionRequest:
        """``request`` as these files see it. Sampling and stops that have no field here are kept by the router."""
        return cls(
            prompt=list(request.prompt_token_ids),
            frequency_penalty=request.sampling.frequency_penalty,
            presence_penalty=request.sampling.presence_penalty,
            logit_bias=dict(request.sampling.logit_bias) or None,
            max_tokens=request.stop.max_tokens,
            seed=request.sampling.seed,
            stop=list(request.stop.stop) or None,
            stream=True,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            user=request.request_id,
        )


class CompletionUsage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    extra: dict[str, Any] | None = None


class CompletionResponseChoice(BaseModel):
    """token_ids (ours): the tokens behind the text; they keep resumed and counted output exact. logprobs, prompt_logprobs:
    as in ``GenerationChunk``, to be passed on."""

    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: Any = None
    prompt_logprobs: Any = None
    text: str
    token_ids: list[int] = Field(default_factory=list)


class CompletionResponse(BaseModel):
    """One piece of output."""

    id: str
    choices: list[CompletionResponseChoice]
    created: int = 0
    model: str | None = None
    object: str = "text_completion"
    usage: CompletionUsage | None = None

    @classmethod
    def of(cls, chunk: GenerationChunk, request_id: str) -> CompletionResponse:
        choice = CompletionResponseChoice(
            text=chunk.text,
            token_ids=list(chunk.token_ids),
            finish_reason=chunk.finish_reason,
            logprobs=chunk.logprobs or None,
            prompt_logprobs=chunk.prompt_logprobs,
        )
        usage = CompletionUsage(
            prompt_tokens=chunk.prompt_tokens,
            completion_tokens=chunk.completion_tokens,
            total_tokens=chunk.prompt_tokens + chunk.completion_tokens,
            extra={"cached_tokens": chunk.cached_tokens},
        )
        return cls(id=request_id, choices=[choice], usage=usage)
