"""Runs command lines in this process."""

from __future__ import annotations

from typing import Any

import pytest

from microserving.cli import main as cli


class Ran:
    """What one command line did."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr("microserving.observability.configure_logging", lambda *_: None)

    def run_it(*arguments: str) -> Ran:
        try:
            status = cli.main(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else -1
        return Ran(status, *capsys.readouterr())

    return run_it
