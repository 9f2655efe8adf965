"""From a model's text to thoughts, answer and calls of tools, as it streams."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from microserving.front.chat_output.reasoning import ReasoningParser
from microserving.front.chat_output.tool_calls import (
    CallRules,
    CallsParser,
    HermesParser,
    LlamaParser,
    MistralParser,
    new_call_id,
    new_mistral_id,
)
from microserving.protocol.chat_formats import ReasoningFormat, ToolCallFormat
from microserving.protocol.chat_responses import Content, Piece, PieceReader, PlainText

_PARSERS: Final[dict[ToolCallFormat, type[CallsParser]]] = {
    "hermes": HermesParser,
    "llama3": LlamaParser,
    "mistral": MistralParser,
}


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How a model's output to one request is read. tools: the names of those that it may call; several: more than one
    in an answer. only_calls: a grammar lets nothing else through, so that other text is the beginning of a call that was
    cut, and is not shown. thinks_already: the prompt ends within the thoughts."""

    tools: Collection[str] = ()
    several: bool = True
    only_calls: bool = False
    calls: ToolCallFormat = "hermes"
    reasoning: ReasoningFormat = "none"
    thinks_already: bool = False

    @property
    def make_reader(self) -> Callable[[], PieceReader] | None:
        """Of one choice; None when all text is the answer."""
        return self._reader if self.tools or self.reasoning != "none" else None

    def _reader(self) -> PieceReader:
        reader: PieceReader = PlainText()
        if self.tools:
            new_id = new_mistral_id if self.calls == "mistral" else new_call_id
            reader = _PARSERS[self.calls](CallRules(self.tools, self.several, new_id))
        if self.only_calls:
            reader = _OnlyCalls(reader)
        if self.reasoning == "think":
            reader = ReasoningParser(reader, opened=self.thinks_already)
        return reader


class _OnlyCalls:
    """What another reader gives, without text."""

    def __init__(self, reader: PieceReader) -> None:
        self._reader = reader

    def put(self, text: str) -> Sequence[Piece]:
        return self._calls(self._reader.put(text))

    def end(self) -> Sequence[Piece]:
        return self._calls(self._reader.end())

    def _calls(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return [piece for piece in pieces if not isinstance(piece, Content)]
