"""Markers in text that comes in pieces."""

from __future__ import annotations


def open_end(text: str, marker: str) -> int:
    """Where the end of ``text`` begins that may become ``marker`` with what comes, the space before it included."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return len(text[: len(text) - length].rstrip())
    return len(text.rstrip())
