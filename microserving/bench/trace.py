"""Reads recorded requests: JSONL, one object a line, every fault one line that names file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from microserving.bench.workloads import TraceEntry
from microserving.errors import ConfigError

_MAX_TOKENS = 10_000_000
_PROMPT_TOKENS = ("input_tokens", "prompt_tokens", "input_length")
_OUTPUT_TOKENS = ("output_tokens", "max_tokens", "output_length")
"""Names in use for the same; the last ones are Mooncake's."""


def read_trace(path: Path, *, milliseconds: bool = False) -> list[TraceEntry]:
    """The entries by time, the first one at 0.

    A line has `timestamp` (seconds, or milliseconds), `output_tokens`, and one of `prompt`, `messages` (OpenAI's),
    `input_tokens`. Raises ConfigError.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")  # JSON's texts may have other line ends in them
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    entries = sorted(_entries(lines, path, 1000 if milliseconds else 1), key=lambda entry: entry.timestamp)
    if not entries:
        raise ConfigError(f"the trace {path} has no requests")
    return entries


def offsets(entries: list[TraceEntry]) -> list[float]:
    """Seconds after the first one."""
    return [entry.timestamp - entries[0].timestamp for entry in entries]


def _entries(lines: list[str], path: Path, unit: int) -> Iterator[TraceEntry]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _entry(json.loads(line), unit)
            except (ValueError, RecursionError) as error:
                reason = error if type(error) is ValueError else "not JSON"
                raise ConfigError(f"{path}:{number}: {reason}") from None


def _entry(data: Any, unit: int) -> TraceEntry:
    """Raises ValueError."""
    if not isinstance(data, dict):
        raise ValueError("not an object")
    timestamp = data.get("timestamp")
    if not isinstance(timestamp, int | float) or isinstance(timestamp, bool) or not 0 <= timestamp < 1e15:
        raise ValueError("timestamp must be a number, 0 or more")
    prompt, messages = data.get("prompt"), data.get("messages")
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError("prompt must be a text")
    if messages is not None and not (
        isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    ):
        raise ValueError("messages must be a list of objects")
    if messages == []:
        raise ValueError("messages must not be empty")
    try:
        json.dumps([prompt, messages], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no text") from None
    own_words = prompt is not None or messages is not None
    tokens = 0 if own_words else _tokens(data, _PROMPT_TOKENS)
    return TraceEntry(timestamp / unit, _tokens(data, _OUTPUT_TOKENS), tokens, prompt, messages)


def _tokens(data: dict[str, Any], names: tuple[str, ...]) -> int:
    value = next((data[name] for name in names if name in data), None)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_TOKENS:
        raise ValueError(f"{names[0]} must be a number of tokens, 1 or more")
    return value
