"""How a long step shows itself on standard error: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

Progress = Callable[[str, int, int], None]
"""progress(what, done, total), in bytes; called often; ``done == total`` ends a step."""

_WIDTH = 30
_PLAIN_STEPS = 4


class Stream(Protocol):
    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing."""


class ProgressBar:
    """Call it as a ``Progress``. One line per step on a terminal; else one line per quarter of a step."""

    def __init__(self, stream: Stream | None = None) -> None:
        self._stream: Stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._shown: tuple[str, int] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        fraction = min(done / total, 1.0) if total > 0 else 1.0
        step = int(fraction * (_WIDTH * 4 if self._terminal else _PLAIN_STEPS))
        if self._shown == (what, step):
            return
        self._shown = (what, step)
        counts = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
        if self._terminal:
            filled = int(fraction * _WIDTH)
            end = "\n" if done >= total else ""
            self._stream.write(f"\r{what} [{'#' * filled}{'.' * (_WIDTH - filled)}] {counts}{end}")
        else:
            self._stream.write(f"{what}: {int(fraction * 100)}% ({counts})\n")
        self._stream.flush()
