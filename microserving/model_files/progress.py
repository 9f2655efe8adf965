"""How long steps tell how far they are. Who shows it, and how, is not known here."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""progress(what, done, total), in bytes; called often; ``done == total`` ends a step."""


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing."""
