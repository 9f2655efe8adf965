"""OpenAI's answers to a chat, as bytes: `chat.completion` and `chat.completion.chunk`.

Owns the shapes of messages and deltas, and the pieces that a model's output is taken apart into. Does not know how: a
parser is given (``front.chat_output``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from microserving.protocol.generation import FinishReason, GenerationChunk, TokenLogprob
from microserving.protocol.logprobs import TokenTexts, chat_logprobs
from microserving.protocol.responses import ChoicesShape, FinishedChoice


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the thoughts before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The answer's call number ``index``, of the function ``name``."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of that call's arguments, which are JSON all together."""

    index: int
    text: str


Piece = Content | Reasoning | CallBegin | CallArguments


class PieceReader(Protocol):
    """Takes one choice's text apart as it comes. The pieces, joined, are the same wherever the text was cut."""

    def put(self, text: str) -> Sequence[Piece]:
        """What is certain now. Nothing is given that may turn out to be a part of a marker."""

    def end(self) -> Sequence[Piece]:
        """No more text comes: what was held back."""


class PlainText:
    """All text is the answer."""

    def put(self, text: str) -> Sequence[Piece]:
        return [Content(text)] if text else []

    def end(self) -> Sequence[Piece]:
        return []


@dataclass(slots=True)
class _Choice:
    """What a stream has of a choice: how it is read, whether it has called a tool, tokens that no event has told yet."""

    reader: PieceReader
    called: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ChatShape(ChoicesShape):
    """`chat.completion`, and its chunks. make_reader: of each choice; None = all text is the answer."""

    id_prefix = "chatcmpl"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"
    _around_text = (b'"delta":{"content":', b"}")

    def __init__(self, *, make_reader: Callable[[], PieceReader] | None = None, **head: Any) -> None:
        super().__init__(**head)
        self._make_reader = make_reader or PlainText
        self._plain = make_reader is None
        self._open: dict[int, _Choice] = {}
        self._scored: TokenTexts | None = None if head.get("logprobs") is None else head.get("texts")

    def next_event(self, index: int, chunk: GenerationChunk) -> bytes | None:
        return super().next_event(index, chunk) if self._plain else None

    def _choices(self, index: int, chunk: GenerationChunk, first: bool) -> list[dict[str, Any]]:
        """The role travels with the first content, the finish reason alone with an empty delta (as OpenAI does)."""
        choice = self._open.get(index) or self._open.setdefault(index, _Choice(self._make_reader()))
        finish = chunk.finish_reason
        pieces = [*choice.reader.put(chunk.text), *(choice.reader.end() if finish is not None else ())]
        deltas = [_delta(piece) for piece in joined_pieces(pieces)]
        if first and not deltas and finish is not None:
            deltas = [{"content": ""}]
        if first and deltas:
            deltas[0] = {"role": "assistant", **_first_content(deltas[0]), **deltas[0]}
        choice.called = choice.called or any(isinstance(piece, CallBegin) for piece in pieces)
        choice.token_ids += chunk.token_ids
        choice.logprobs += chunk.logprobs
        shown = [self._entry(index, choice, delta, None) for delta in deltas]
        if finish is not None:
            shown.append(self._entry(index, choice, {}, _finish(finish, choice.called)))
            del self._open[index]
        return shown

    def _entry(
        self, index: int, choice: _Choice, delta: dict[str, Any], finish: FinishReason | None
    ) -> dict[str, Any]:
        """With it go the tokens that no event has told yet."""
        scores = self._scores(choice.logprobs) if choice.logprobs else None
        shown = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        ids, choice.token_ids, choice.logprobs = tuple(choice.token_ids), [], []
        return self._with_ids(shown, ids)

    def _whole_choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        reader = self._make_reader()
        pieces = [*reader.put(choice.text), *reader.end()]
        message = _message(pieces)
        finish = _finish(choice.finish_reason, "tool_calls" in message)
        scores = self._scores(choice.logprobs)
        shown = {"index": index, "message": message, "logprobs": scores, "finish_reason": finish}
        return self._with_ids(shown, choice.token_ids)

    def _scores(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        """`logprobs`, when they are shown."""
        return None if self._scored is None else chat_logprobs(tokens, self._scored.token_bytes)


def _finish(reason: FinishReason, called: bool) -> FinishReason:
    return "tool_calls" if called and reason == "stop" else reason


def joined_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of a kind as one."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(last.index, last.text + piece.text)
        else:
            result.append(piece)
    return result


def _delta(piece: Piece) -> dict[str, Any]:
    """A call's id and name are in its first delta only."""
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(index, call_id, name):
            return {"tool_calls": [{"index": index, **_call(call_id, name, "")}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _first_content(delta: dict[str, Any]) -> dict[str, Any]:
    return {} if "content" in delta else {"content": None}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """content: null when there are only calls."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    begun = [piece for piece in pieces if isinstance(piece, CallBegin)]
    arguments = dict.fromkeys((call.index for call in begun), "")
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if begun else "")}
    message["refusal"] = None
    if thoughts:
        message["reasoning_content"] = thoughts
    if begun:
        message["tool_calls"] = [_call(call.call_id, call.name, arguments[call.index]) for call in begun]
    return message
