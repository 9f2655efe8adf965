"""Server-sent events: encoding for servers, an incremental parser for clients.

Knows the event-stream format only (WHATWG HTML, "Server-sent events"), not what the data means.
"""

from __future__ import annotations

import codecs
from typing import Final

from microserving.errors import EngineUnavailable

DONE_DATA: Final = "[DONE]"
"""The data of OpenAI's end marker."""
_DATA: Final = b"data: "
DONE_EVENT: Final = b"data: [DONE]\n\n"
MAX_EVENT_BYTES: Final = 8 * 2**20


def encode_event(data: bytes) -> bytes:
    """One event. ``data`` must hold no line break (JSON without indentation never does)."""
    return b"data: " + data + b"\n\n"


class SSEParser:
    """Turns the bytes of an event stream, split anywhere, into the data of each event.

    Accepts LF, CRLF and CR line ends, comments, multi-line data, a leading byte order mark; ignores other fields.
    An event that is not ended by an empty line is not delivered (a broken stream), as the standard says.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = ""
        self._after_cr = False
        self._data: list[str] = []
        self._held = 0
        self._at_start = True
        self._at_rest = True  # nothing of an event that is not whole is held

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that ``chunk`` completed.

        Raises EngineUnavailable when one event is longer than the limit (the peer is not what we think it is).
        """
        if self._at_rest and chunk.startswith(_DATA) and chunk.endswith(b"\n\n") and b"\r" not in chunk:
            # whole events of one data line each, as servers like ours send them; nearly always one
            is_one = chunk.find(b"\n") == len(chunk) - 2
            is_plain = is_one or chunk.count(b"\n") == 2 * (chunk.count(b"\n\ndata: ") + 1)
            if is_plain and len(chunk) <= self._max_event_bytes:
                self._at_start = False
                plain = chunk[len(_DATA) : -2].decode("utf-8", "replace")
                return [plain] if is_one else plain.split("\n\ndata: ")
        text = self._decoder.decode(chunk)
        if self._at_start and text:
            text = text.removeprefix("\ufeff")
            self._at_start = False
        if self._after_cr and text:
            text = text.removeprefix("\n")
            self._after_cr = False
        if text.endswith("\r"):
            self._after_cr = True
        *lines, rest = (self._line + text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
        self._line = rest
        events = [event for event in map(self._take_line, lines) if event is not None]
        if self._held + len(rest) > self._max_event_bytes:
            raise EngineUnavailable("the engine sent an event over the size limit")
        self._at_rest = not (rest or self._data or self._after_cr or self._decoder.getstate()[0])
        return events

    def _take_line(self, line: str) -> str | None:
        if not line:
            data, self._data, self._held = self._data, [], 0
            return "\n".join(data) if data else None
        name, _, value = line.partition(":")
        if name == "data":
            value = value.removeprefix(" ")
            self._data.append(value)
            self._held += len(value) + 1  # the line break, so that empty lines count
        return None
