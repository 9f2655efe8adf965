"""The items of an answer's `output` as they grow, and the events that tell of them.

Owns the forms of messages, thoughts and calls, and which events surround them. Does not know the answer they are of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from microserving.protocol.chat_responses import CallArguments, CallBegin, Content, Piece, Reasoning

Event = tuple[str, dict[str, Any]]
"""Its type, and its fields but the type and the number."""
Status = Literal["in_progress", "completed", "incomplete"]


class Item(ABC):
    """One item, which grows by texts until it ends."""

    _prefix: ClassVar[str]
    _grows: ClassVar[str]
    """The type of its events, as far as they have it in common."""
    _whole: ClassVar[str]
    """The field that holds all of the text when it has ended."""
    _beside: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """What stands beside a text."""

    def __init__(self, index: int, request_id: str) -> None:
        """index: in `output`."""
        self._index = index
        self._id = f"{self._prefix}_{request_id}_{index}"
        self._status: Status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """What it has grown to."""
        return "".join(self._texts)

    def begin(self) -> list[Event]:
        return [self._told("added")]

    def grow(self, text: str) -> Event:
        self._texts.append(text)
        return f"{self._grows}.delta", {**self._place(), **self._beside, "delta": text}

    def end(self, status: Status) -> list[Event]:
        self._status = status
        whole = {**self._place(), **self._beside, self._whole: self.text}
        return [(f"{self._grows}.done", whole), self._told("done")]

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """As `output` has it now."""

    def _place(self) -> dict[str, Any]:
        """What its events begin with."""
        return {"item_id": self._id, "output_index": self._index}

    def _told(self, what: str) -> Event:
        return f"response.output_item.{what}", {"output_index": self._index, "item": self.body()}


class _TextItem(Item):
    """An item whose text is its one part."""

    _whole = "text"

    def begin(self) -> list[Event]:
        return [*super().begin(), self._part_told("added")]

    def end(self, status: Status) -> list[Event]:
        text_done, item_done = super().end(status)
        return [text_done, self._part_told("done"), item_done]

    def _place(self) -> dict[str, Any]:
        return {**super()._place(), "content_index": 0}

    def _content(self) -> list[dict[str, Any]]:
        """Empty at the beginning."""
        return [self._part()] if self._texts or self._status != "in_progress" else []

    @abstractmethod
    def _part(self) -> dict[str, Any]: ...

    def _part_told(self, what: str) -> Event:
        return f"response.content_part.{what}", {**self._place(), "part": self._part()}


class Message(_TextItem):
    """What the model says."""

    _prefix = "msg"
    _grows = "response.output_text"
    _beside = MappingProxyType({"logprobs": []})

    def body(self) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "status": self._status, "role": "assistant"}
        return {**head, "content": self._content()}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class Thoughts(_TextItem):
    """What the model thinks. The text is told as it is, so there is no summary."""

    _prefix = "rs"
    _grows = "response.reasoning_text"

    def body(self) -> dict[str, Any]:
        head = {"id": self._id, "type": "reasoning", "status": self._status, "summary": []}
        return {**head, "content": self._content()}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class Call(Item):
    """A call of the function ``name``, which grows by its arguments."""

    _prefix = "fc"
    _grows = "response.function_call_arguments"
    _whole = "arguments"

    def __init__(self, index: int, request_id: str, call_id: str, name: str) -> None:
        super().__init__(index, request_id)
        self._call = {"call_id": call_id, "name": name}

    def body(self) -> dict[str, Any]:
        head = {"id": self._id, "type": "function_call", "status": self._status}
        return {**head, **self._call, "arguments": self.text}


class Output:
    """The items of one answer, of which the last one may be open. Every method gives the events of what it did."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._items: list[Item] = []
        self._open: Item | None = None

    def put(self, piece: Piece) -> list[Event]:
        match piece:
            case Content(text):
                return self._say(Message, text)
            case Reasoning(text):
                return self._say(Thoughts, text)
            case CallBegin(_, call_id, name):
                return self._begin(Call(len(self._items), self._request_id, call_id, name))
            case CallArguments(_, text):
                assert isinstance(self._open, Call)  # a reader tells a call's arguments behind its beginning
                return [self._open.grow(text)]

    def end(self, status: Status) -> list[Event]:
        """Nothing more comes. An answer without any text has an empty message. status: of the item that is open."""
        begun = [] if self._items else self._begin(Message(0, self._request_id))
        return begun + self.close(status)

    def close(self, status: Status) -> list[Event]:
        """End the item that is open, if any."""
        item, self._open = self._open, None
        return [] if item is None else item.end(status)

    def items(self) -> list[dict[str, Any]]:
        return [item.body() for item in self._items]

    @property
    def thought(self) -> bool:
        """Whether there are thoughts in it."""
        return any(isinstance(item, Thoughts) for item in self._items)

    @property
    def open_message(self) -> Message | None:
        """The item that is open, when it is a message."""
        return self._open if isinstance(self._open, Message) else None

    def _say(self, kind: type[Message | Thoughts], text: str) -> list[Event]:
        if isinstance(self._open, kind):
            return [self._open.grow(text)]
        item = kind(len(self._items), self._request_id)
        return [*self._begin(item), item.grow(text)]

    def _begin(self, item: Item) -> list[Event]:
        closed = self.close("completed")
        self._items.append(item)
        self._open = item
        return closed + item.begin()
