"""Finds calls of tools in a model's output, in the forms that models write them.

Owns the markers and the order of text and calls. ``call_reader`` reads a call itself. Space beside calls is layout and
left out. What turns out to be no call is text, whole.
"""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from microserving.front.chat_output.call_reader import CallReader, ValueScanner
from microserving.front.chat_output.markers import open_end
from microserving.protocol.chat_responses import CallArguments, CallBegin, Content, Piece

_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MAX_HEAD_CHARS: Final = 256
_NAME_CHARS: Final = frozenset(string.ascii_letters + string.digits + "_.-")


def new_call_id() -> str:
    """In OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def new_mistral_id() -> str:
    """Nine letters and digits: Mistral's templates refuse other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class CallRules:
    """names: the tools that there are. several: whether more than one call is shown; if not, the others are left out."""

    names: Collection[str]
    several: bool = True
    new_id: Callable[[], str] = new_call_id


class CallsParser(ABC):
    """Text, and calls in it. A state is a method that takes the text not read yet and gives back what is left of it, or
    None when it needs more than that; it keeps what it has seen in ``_held``."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._state: Callable[[str], str | None] = self._first
        self._held = ""
        self._pieces: list[Piece] = []
        self._reader: CallReader | None = None
        self._calls = 0

    def put(self, text: str) -> list[Piece]:
        rest: str | None = text
        while rest:
            rest = self._state(rest)
        return self._given()

    def end(self) -> list[Piece]:
        reader = self._reader
        if reader is not None:
            reader.end()
            self._show(reader)
            self._held += "" if reader.begun else reader.raw
        elif self._state == self._behind_call:  # the beginning of a marker, perhaps
            self._held = ""
        if self._held.strip() or not self._calls:
            self._say(self._held)
        self._held = ""
        return self._given()

    @abstractmethod
    def _first(self, text: str) -> str | None:
        """The state at the beginning."""

    @abstractmethod
    def _behind_call(self, text: str) -> str | None:
        """The state when a call's object is complete."""

    @abstractmethod
    def _behind_no_call(self) -> Callable[[str], str | None]:
        """The state when a call had seemed to begin; its text is told."""

    def _given(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))

    def _plain(self, text: str) -> str | None:
        """The state when no call can come any more."""
        self._say(self._held + text)
        self._held = ""
        return None

    def _read_object(self, accepts: Callable[[str], bool]) -> None:
        """A call's object comes next."""
        self._reader = CallReader(accepts)
        self._shown = False
        self._state = self._object

    def _object(self, text: str) -> str | None:
        reader = self._reader
        assert reader is not None
        rest = reader.put(text)
        self._show(reader)
        if reader.finished:
            self._reader = None
            if reader.begun:
                self._state = self._behind_call
            else:
                self._say(self._held + reader.raw)
                self._held = ""
                self._state = self._behind_no_call()
        return rest or None

    def _show(self, reader: CallReader) -> None:
        """Tell what is new of a call."""
        if not reader.begun:
            return
        if not self._shown:
            self._shown, self._held = True, ""
            self._begin(reader.name)
        self._argue(reader.take_arguments())

    def _begin(self, name: str) -> None:
        self._calls += 1
        if self._visible:
            self._pieces.append(CallBegin(self._calls - 1, self._rules.new_id(), name))

    def _argue(self, text: str) -> None:
        if text and self._visible:
            self._pieces.append(CallArguments(self._calls - 1, text))

    @property
    def _visible(self) -> bool:
        return self._calls == 1 or self._rules.several

    def _until_marker(self, text: str, marker: str) -> str | None:
        """Tell what is before ``marker``, hold it, and give what is behind it. None: it has not come."""
        text = self._held + text
        at = text.find(marker)
        if at < 0:
            end = open_end(text, marker)
            self._say(text[:end])
            self._held = text[end:]
            return None
        before = text[:at].rstrip()
        self._say(before)
        self._held = text[len(before) : at + len(marker)]
        return text[at + len(marker) :]

    def _any_name(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    def _known_name(self, name: str) -> bool:
        return name in self._rules.names


class HermesParser(CallsParser):
    """Hermes, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text."""

    OPEN: Final = "<tool_call>"
    CLOSE: Final = "</tool_call>"

    def _first(self, text: str) -> str | None:
        rest = self._until_marker(text, self.OPEN)
        if rest is not None:
            self._read_object(self._any_name)
        return rest

    def _behind_call(self, text: str) -> str | None:
        text = self._held + text
        self._held = ""
        stripped = text.lstrip()
        if stripped.startswith(self.CLOSE):
            self._state = self._first
            return stripped[len(self.CLOSE) :]
        if self.CLOSE.startswith(stripped):
            self._held = text
            return None
        self._state = self._first
        return text

    def _behind_no_call(self) -> Callable[[str], str | None]:
        return self._first


class LlamaParser(CallsParser):
    """Llama 3: `{"name": ..., "parameters": {...}}` from the beginning, perhaps behind `<|python_tag|>`; several with a
    `;` between them. Only the name of a tool that there is makes it a call: the model may just say JSON."""

    MARKER: Final = "<|python_tag|>"

    def _first(self, text: str) -> str | None:
        return self._before_object(text, self.MARKER)

    def _behind_call(self, text: str) -> str | None:
        return self._before_object(text, ";")

    def _behind_no_call(self) -> Callable[[str], str | None]:
        return self._plain

    def _before_object(self, text: str, marker: str) -> str | None:
        """An object comes next, perhaps behind space and ``marker``; else plain text."""
        text = self._held + text
        rest = text.lstrip()
        if not rest or (len(rest) < len(marker) and marker.startswith(rest)):
            self._held = text
            return None
        rest = rest.removeprefix(marker).lstrip()
        if not rest:
            self._held = text
            return None
        if not rest.startswith("{"):
            self._held, self._state = "", self._plain
            return text
        self._held = text[: len(text) - len(rest)]
        self._read_object(self._known_name)
        return rest


class MistralParser(CallsParser):
    """Mistral: `[TOOL_CALLS]` and a list of objects, or (since 2025) a name, `[ARGS]` and the arguments for each call.

    The marker is a special token, which a detokeniser may leave out: a list with a call of a tool that there is, at the
    beginning, counts as well.
    """

    MARKER: Final = "[TOOL_CALLS]"
    ARGUMENTS: Final = "[ARGS]"
    CALL_ID: Final = "[CALL_ID]"

    def __init__(self, rules: CallRules) -> None:
        super().__init__(rules)
        self._accepts = self._known_name
        self._value = ValueScanner()

    def _first(self, text: str) -> str | None:
        """A list, or text."""
        text = self._held + text
        rest = text.lstrip()
        if not rest:
            self._held = text
            return None
        if rest.startswith("[") and (inner := rest[1:].lstrip()) and inner[0] == "{":
            return self._enter_list(text, inner)
        if rest == "[" or (rest.startswith("[") and not rest[1:].strip()):
            self._held = text
            return None
        self._held, self._state = "", self._text
        return text

    def _text(self, text: str) -> str | None:
        rest = self._until_marker(text, self.MARKER)
        if rest is not None:
            self._state, self._accepts = self._behind_marker, self._any_name
        return rest

    def _enter_list(self, text: str, inner: str) -> str:
        self._held = text[: len(text) - len(inner)]
        self._read_object(self._accepts)
        return inner

    def _behind_marker(self, text: str) -> str | None:
        """A list, an object, or a name."""
        text = self._held + text
        rest = text[text.index(self.MARKER) + len(self.MARKER) :].lstrip()
        start = rest.removeprefix("[").lstrip() if rest.startswith("[") else rest
        if not start:
            self._held = text
            return None
        if start[0] == "{":
            return self._enter_list(text, start)
        if rest[0] in _NAME_CHARS:
            self._held = text[: len(text) - len(rest)]
            self._name = ""
            self._state = self._read_name
            return rest
        self._state = self._text
        self._say(text[: len(text) - len(rest)])
        self._held = ""
        return rest

    def _read_name(self, text: str) -> str | None:
        """`name[CALL_ID]id[ARGS]{...}`, of which the id and its marker may be missing."""
        self._name += text
        head, brace, rest = self._name.partition("{")
        if not brace and len(head) <= _MAX_HEAD_CHARS:
            return None
        name = head.strip().removesuffix(self.ARGUMENTS).partition(self.CALL_ID)[0].strip()
        if not brace or len(head) > _MAX_HEAD_CHARS or not _NAME.fullmatch(name):
            self._state, held, self._held = self._text, self._held, ""
            self._say(held)
            text, self._name = self._name, ""
            return text
        self._held = self._name = ""
        self._begin(name)
        self._value = ValueScanner()
        self._state = self._read_arguments
        return brace + rest

    def _read_arguments(self, text: str) -> str | None:
        end, complete = self._value.scan(text, 0)
        self._argue(text[:end])
        if complete:
            self._state = self._text
        return text[end:] or None

    def _behind_call(self, text: str) -> str | None:
        """Another object of the list, or its end."""
        text = self._held + text
        rest = text.lstrip()
        if rest.startswith(","):
            rest = rest[1:].lstrip()
            if rest.startswith("{"):
                return self._enter_list(text, rest)
        elif rest.startswith("]"):
            self._held, self._state = "", self._text
            return rest[1:]
        if not rest:
            self._held = text
            return None
        self._held, self._state = "", self._text
        return text

    def _behind_no_call(self) -> Callable[[str], str | None]:
        return self._text

    def end(self) -> list[Piece]:
        if self._state == self._read_name:
            self._held += self._name
        return super().end()
