"""What a person sees while runs go on: one line that is redrawn on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time

from microserving.bench.load import Load
from microserving.bench.statistics import spread
from microserving.observability.console import Console

_REDRAW_S = 0.25
_LINE_S = 20.0
_LATEST = 200
"""Requests whose TTFT is shown."""


class Progress:
    """Of an experiment of ``runs`` runs."""

    def __init__(self, console: Console, runs: int) -> None:
        self._console = console
        self._runs = runs
        self._every = _REDRAW_S if sys.stderr.isatty() else _LINE_S
        self._told = 0.0
        self._title = ""
        self._number = 0

    def begin(self, title: str) -> None:
        """A run begins."""
        self._title = title
        self._number += 1
        self._told = time.monotonic()

    def show(self, load: Load) -> None:
        """Where it is."""
        now = time.monotonic()
        if now - self._told < self._every:
            return
        self._told = now
        if sys.stderr.isatty():
            self._console.progress(self._text(load), load.sessions_done / max(load.sessions, 1))
        else:
            self._console.line(self._text(load))

    def end(self, load: Load) -> None:
        """The run is over: a line that stays."""
        self._console.line(self._text(load))

    def _text(self, load: Load) -> str:
        return f"[{self._number}/{self._runs}] {self._title}: {state_of(load)}"


def state_of(load: Load) -> str:
    """In words. Takes no longer in a long run: what is measured by this process waits meanwhile."""
    ttft = spread(record.ttft for record in load.records[-_LATEST:] if record.counted)
    shown = [f"{load.sessions_done}/{load.sessions} done", f"{load.running} running"]
    if load.failed:
        shown.append(f"{load.failed} FAILED")
    if ttft.count:
        shown.append(f"TTFT p50 {ttft.p50:.2f} s")
    return ", ".join(shown)
