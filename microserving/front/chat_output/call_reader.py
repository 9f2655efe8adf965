"""Reads one call of a tool, a JSON object with a name and arguments, as its text comes.

Where the text is cut makes no difference. Owns what counts as a call, and that a text which is none is given back whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

_SPACE: Final = " \t\r\n"
_ARGUMENTS: Final = ("arguments", "parameters")


class ValueScanner:
    """Finds the end of one JSON value by its brackets and quotes."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind")

    def __init__(self) -> None:
        self._kind = ""
        self._depth = 0
        self._in_string = self._escaped = False

    def scan(self, text: str, start: int) -> tuple[int, bool]:
        """(index behind what belongs to the value, whether it is complete) of ``text`` from ``start`` on."""
        for at in range(start, len(text)):
            char = text[at]
            if not self._kind:
                self._kind = char if char in '{["' else "scalar"
            if self._in_string:
                self._string(char)
            elif self._kind == "scalar":
                if char in ",}]" or char in _SPACE:
                    return at, True
                continue
            else:
                self._outside(char)
            if not self._depth and not self._in_string:
                return at + 1, True
        return len(text), False

    def _string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _outside(self, char: str) -> None:
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1


class CallReader:
    """One object. accepts: whether a name is a tool's.

    begun: it is a call, ``name`` is known, and ``take_arguments`` gives what there is of the arguments. Until then
    ``raw`` holds all that was read. finished: the object is complete, or what came cannot belong to it.
    """

    def __init__(self, accepts: Callable[[str], bool]) -> None:
        self._accepts = accepts
        self._expects = "{"
        self._value = ValueScanner()
        self._key = self._text = ""
        self._found = self._of_arguments = self._streams = False
        self._arguments: list[str] = []
        self.name = ""
        self.raw = ""
        self.begun = self.finished = False

    def put(self, text: str) -> str:
        """What of ``text`` does not belong to the object; "" unless it is finished then."""
        at = 0
        while at < len(text) and not self.finished:
            at = self._step(text, at)
        if not self.begun:
            self.raw += text[:at]
        return text[at:]

    def end(self) -> None:
        """No more comes."""
        if self.begun and self._of_arguments and self._expects == "value" and self._text:
            self._arguments.append(_decoded(self._text + '"') or self._text)

    def take_arguments(self) -> str:
        """The arguments' text that came since the last call."""
        text, self._arguments = "".join(self._arguments), []
        return text

    def _step(self, text: str, at: int) -> int:
        """Read from ``at`` on; how far."""
        if self._expects in ("key", "value"):
            return self._read(text, at)
        char = text[at]
        if char in _SPACE:
            return at + 1
        if self._expects == ":,}" and char == "}":
            return self._complete(at)
        return self._punctuation(char, at)

    def _punctuation(self, char: str, at: int) -> int:
        expects = self._expects
        if expects == "{" and char == "{":
            self._expects = "first key"
        elif expects == "first key" and char == "}":
            return self._complete(at)
        elif expects in ("first key", "next key") and char == '"':
            self._begin_value("key")
            return at
        elif expects == ":" and char == ":":
            self._expects = "any value"
        elif expects == "any value":
            self._begin_value("value")
            self._choose(char)
            return at
        elif expects == ":,}" and char == ",":
            self._expects = "next key"
        else:
            self.finished = True
            return at
        return at + 1

    def _begin_value(self, expects: str) -> None:
        self._expects, self._value, self._text = expects, ValueScanner(), ""

    def _choose(self, char: str) -> None:
        """A value begins with ``char``."""
        self._of_arguments = self._key in _ARGUMENTS and not self._found
        self._streams = self._of_arguments and char == "{"
        if self._of_arguments:
            self._found = True
            self.begun = bool(self.name)

    def _read(self, text: str, at: int) -> int:
        end, complete = self._value.scan(text, at)
        part = text[at:end]
        if self._expects == "value" and self._streams:
            self._arguments.append(part)
        else:
            self._text += part
        if complete:
            self._take()
        return end

    def _take(self) -> None:
        """A key or a value is complete."""
        if self._expects == "key":
            self._key = _decoded(self._text) or ""
            self._expects = ":"
            return
        self._expects = ":,}"
        if self._key == "name" and not self.name:
            self.name = _decoded(self._text) or ""
            self.finished = not self.name or not self._accepts(self.name)
            self.begun = self.begun or (self._found and not self.finished)
        elif self._of_arguments and not self._streams:
            text = _decoded(self._text)
            self._arguments.append(("{}" if self._text == "null" else self._text) if text is None else text)
        self._text = ""

    def _complete(self, at: int) -> int:
        self.finished = True
        self.begun = self.begun or bool(self.name)
        if self.begun and not self._found:
            self._arguments.append("{}")
        return at + 1


def _decoded(text: str) -> str | None:
    """The string that a JSON value is; None for another value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
