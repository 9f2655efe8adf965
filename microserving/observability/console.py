"""What a person at the terminal sees: lines and progress, on stderr.

On a terminal progress redraws one line as a bar. Elsewhere it is a few plain lines, in a form that the launcher
understands when the process is its child (``parse_progress``). Log records are not written here.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

ProgressReporter = Callable[[str, float], None]
"""(stage in words, fraction done 0..1)."""

_PROGRESS = re.compile(r"^\[progress\] (?P<stage>.+) (?P<percent>\d{1,3})%$")
_BAR_WIDTH = 30
_REDRAW_S = 0.1


def parse_progress(line: str) -> tuple[str, float] | None:
    """The (stage, fraction) of a progress line that another process's ``Console`` wrote, or None."""
    match = _PROGRESS.match(line)
    if match is None:
        return None
    return match["stage"], min(int(match["percent"]), 100) / 100


class Console:
    """Writes whole lines; safe to use from several threads. A stream that is gone is ignored."""

    def __init__(
        self, stream: TextIO | None = None, *, verbose: bool = False, plain_step: float = 0.05
    ) -> None:
        """plain_step: how much of a stage must pass until the next line, where there is no terminal."""
        self._stream = sys.stderr if stream is None else stream
        self._tty = self._stream.isatty()
        self._lock = threading.Lock()
        self._drawn = False
        self._plain_step = plain_step
        self._last: dict[str, float] = {}
        self._drawn_at = 0.0
        self.verbose = verbose

    def line(self, text: str = "") -> None:
        """Write one line."""
        with self._lock:
            self._end_bar()
            self._write(f"{text}\n")

    def detail(self, text: str) -> None:
        """Write one line, only when verbose."""
        if self.verbose:
            self.line(text)

    def progress(self, stage: str, fraction: float) -> None:
        """Show how far ``stage`` is; 1.0 ends it."""
        fraction = min(max(fraction, 0.0), 1.0)
        with self._lock:
            if not self._is_news(stage, fraction):
                return
            self._last[stage] = fraction
            if self._tty:
                self._draw_bar(stage, fraction)
            else:
                self._write(f"[progress] {stage} {int(fraction * 100)}%\n")

    def reporter(self, prefix: str) -> ProgressReporter:
        """A progress function whose stages start with ``prefix``."""
        return lambda stage, fraction: self.progress(f"{prefix}: {stage}", fraction)

    def _is_news(self, stage: str, fraction: float) -> bool:
        last = self._last.get(stage, -1.0)
        if last < 0 or fraction < last or (fraction >= 1.0 > last):
            return True
        if self._tty:
            return fraction != last and time.monotonic() - self._drawn_at >= _REDRAW_S
        return fraction - last >= self._plain_step - 1e-9

    def _draw_bar(self, stage: str, fraction: float) -> None:
        filled = int(fraction * _BAR_WIDTH)
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        self._write(f"\r\x1b[K[{bar}] {int(fraction * 100):3d}% {stage}")
        self._drawn = True
        self._drawn_at = time.monotonic()
        if fraction >= 1.0:
            self._end_bar()

    def _end_bar(self) -> None:
        if self._drawn:
            self._write("\n")
            self._drawn = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            return  # the terminal was closed; the work goes on
