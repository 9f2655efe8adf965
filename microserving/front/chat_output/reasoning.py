"""Splits what a model thinks, between `<think>` and `</think>` at the beginning of its output, from what it says.

Space beside these markers is layout and left out.
"""

from __future__ import annotations

from typing import Final

from microserving.front.chat_output.markers import open_end
from microserving.protocol.chat_responses import Piece, PieceReader, Reasoning

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class ReasoningParser:
    """opened: the prompt's end has begun the thoughts already. rest: reads what follows them."""

    def __init__(self, rest: PieceReader, *, opened: bool) -> None:
        self._rest = rest
        self._opened = opened
        self._state = "start"
        self._held = ""
        self._thought = False

    def put(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        text = self._held + text
        self._held = ""
        if self._state == "start":
            text = self._start(text)
        if self._state == "thinking":
            text = self._thinking(text, pieces)
        if self._state == "between" and (text := text.lstrip()):
            self._state = "rest"
        if self._state == "rest" and text:
            pieces += self._rest.put(text)
        return pieces

    def end(self) -> list[Piece]:
        held, self._held = self._held, ""
        if not held:
            return [*self._rest.end()]
        if self._state == "thinking" or self._opened:
            return [Reasoning(held), *self._rest.end()]
        return [*self._rest.put(held), *self._rest.end()]

    def _start(self, text: str) -> str:
        """The text behind the opening marker, or all of it when there is none."""
        stripped = text.lstrip()
        if stripped.startswith(OPEN):
            self._state = "thinking"
            return stripped[len(OPEN) :]
        if OPEN.startswith(stripped):  # not all of it has come, or only space
            self._held = text
            return ""
        self._state = "thinking" if self._opened else "rest"
        return text

    def _thinking(self, text: str, pieces: list[Piece]) -> str:
        """The text behind the closing marker."""
        text = text if self._thought else text.lstrip()
        at = text.find(CLOSE)
        if at >= 0:
            self._state = "between"
            thought, rest = text[:at].rstrip(), text[at + len(CLOSE) :]
        else:
            end = open_end(text, CLOSE)
            thought, self._held, rest = text[:end], text[end:], ""
        if thought:
            self._thought = True
            pieces.append(Reasoning(thought))
        return rest
