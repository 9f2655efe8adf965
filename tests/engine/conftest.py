"""Fixtures of the hand-off's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .handoff_setup import Setup


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.sending.close()
    made.receiving.close()
