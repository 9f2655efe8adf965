"""The answer of `start_generate` as its client reads it: event by event, or whole.

Read with msgspec, because a router reads one event for every token of every client. Knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from microserving.errors import EngineUnavailable, MicroservingError, error_from_body
from microserving.protocol.generation import FinishReason, GenerationChunk, TokenLogprob
from microserving.protocol.logprobs import WireLogprob, from_wire
from microserving.protocol.sse import DONE_DATA

_FINISH_REASONS: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "preempt": "preempt",
}


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    token_logprobs: list[WireLogprob] | None = None
    prompt_token_logprobs: list[WireLogprob | None] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    """A chunk of a stream, or a whole completion. error: in place of them."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class GenerationStreamReader:
    """Turns the events of a `start_generate` stream into ``GenerationChunk``s, in order.

    prompt_tokens: the prompt's length; resumed_tokens: of the request's ``resume_output_ids``, which count as output and
    do not come again. The chunk with the finish reason is held back until the usage event or the end marker came, so
    that its totals are exact. ``done`` is True only after a whole stream.
    """

    prompt_tokens: int
    resumed_tokens: int = 0
    done: bool = False
    _finished: bool = False
    _received_tokens: int = 0
    _last: GenerationChunk | None = None

    def feed(self, data: str) -> list[GenerationChunk]:
        """The chunks that one event's data completes. Raises the error that an error event stands for, or
        EngineUnavailable when the event is not a completion chunk."""
        if data == DONE_DATA:
            if not self._finished:
                raise EngineUnavailable("the engine ended a generation without a finish reason")
            self.done = True
            last, self._last = self._last, None
            return [] if last is None else [last]
        event = _parse(data)
        chunks = self._take(event.choices[0]) if event.choices else []
        if event.usage is not None and self._last is not None:
            chunks.append(_with_usage(self._last, event.usage))
            self._last = None
        return chunks

    def read_whole(self, body: bytes) -> GenerationChunk:
        """The one chunk of an answer that was not streamed. Raises as ``feed``."""
        event = _parse(body)
        if not event.choices or event.choices[0].finish_reason is None:
            raise EngineUnavailable("the engine ended a generation without a finish reason")
        self._take(event.choices[0])
        assert self._last is not None  # it has a finish reason
        self.done = True
        return self._last if event.usage is None else _with_usage(self._last, event.usage)

    def _take(self, choice: _Choice) -> list[GenerationChunk]:
        token_ids, reason = choice.token_ids or (), choice.finish_reason
        self._received_tokens += len(token_ids)
        scores, prompt_scores = choice.token_logprobs, choice.prompt_token_logprobs
        chunk = GenerationChunk(
            choice.text or "",
            token_ids,
            None if reason is None else _finish_reason(reason),
            self.prompt_tokens,
            self.resumed_tokens + self._received_tokens,
            0,
            tuple(map(from_wire, scores)) if scores else (),
            None if prompt_scores is None else _scores(prompt_scores),
        )
        if self._finished:
            raise EngineUnavailable("the engine went on after the finish reason")
        if reason is None:
            return [chunk]
        self._last, self._finished = chunk, True
        return []


def stream_error(error: dict[str, object]) -> MicroservingError:
    """The exception behind an error event, which carries no HTTP status: by its code, else a failed engine."""
    return error_from_body(502, error)


def _parse(data: str | bytes) -> _Event:
    try:
        event = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"the engine sent a wrong chunk: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EngineUnavailable("the engine sent an event that is not a JSON object") from None
    if isinstance(event.error, dict):
        raise stream_error(event.error)
    return event


def _finish_reason(value: str) -> FinishReason:
    known = _FINISH_REASONS.get(value)
    if known is None:
        raise EngineUnavailable("the engine sent an unknown finish reason")
    return known


def _scores(tokens: list[WireLogprob | None]) -> tuple[TokenLogprob | None, ...]:
    return tuple(None if token is None else from_wire(token) for token in tokens)


def _with_usage(chunk: GenerationChunk, usage: _Usage) -> GenerationChunk:
    details = usage.prompt_tokens_details
    return replace(
        chunk,
        prompt_tokens=usage.prompt_tokens or 0,
        completion_tokens=usage.completion_tokens or 0,
        cached_tokens=0 if details is None else details.cached_tokens or 0,
    )
