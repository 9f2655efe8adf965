"""Log lines: one event, one line, with the request id. Owns the format; knows nothing of what is logged.

Nothing happens on import. Only the CLI calls `configure_logging`; everybody else uses
``logging.getLogger(__name__)`` with lazy ``%s`` arguments and, around a request, `request_id_scope`.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["plain", "json"]

_request_id: ContextVar[str | None] = ContextVar("microserving_request_id", default=None)


def current_request_id() -> str | None:
    """The id of the request that this task or thread serves."""
    return _request_id.get()


class request_id_scope:  # noqa: N801 - a context manager reads as a verb
    """Log lines of the enclosed code carry ``request_id``."""

    __slots__ = ("_request_id", "_token")

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __enter__(self) -> None:
        self._token = _request_id.set(self._request_id)

    def __exit__(self, *_: object) -> None:
        _request_id.reset(self._token)


def escape_controls(text: str) -> str:
    r"""``text`` with everything unprintable (line breaks, ANSI escapes, U+2028, lone surrogates) as ``\x1b``-like."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class _Formatter(logging.Formatter):
    """One line a record: plain text, or a JSON object with time, level, logger, message, request_id, error."""

    def __init__(self, style: LogFormat) -> None:
        super().__init__()
        self._json = style == "json"

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        request_id = getattr(record, "request_id", None) or _request_id.get()
        message = record.getMessage()
        error = self.formatException(record.exc_info) if record.exc_info else None
        if self._json:
            event = {
                "time": stamp,
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": message,
            }
            extra = {"request_id": request_id, "error": error}
            return json.dumps(event | {key: value for key, value in extra.items() if value is not None})
        parts = [stamp, record.levelname, record.name, message]
        if request_id is not None:
            parts.append(f"[{request_id}]")
        if error is not None:
            parts.append(error)
        return " ".join(escape_controls(part) for part in parts)


def configure_logging(level: str = "INFO", style: LogFormat = "plain", stream: TextIO | None = None) -> None:
    """Send all log records to ``stream`` (stderr). Replaces what an earlier call set up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(style))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
