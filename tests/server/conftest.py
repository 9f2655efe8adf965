from __future__ import annotations

from collections.abc import Iterator

import pytest

from .engines import Running, prefill_and_decode


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Running]]:
    """[prefill, decode], shared by the tests of a module; every test must leave them idle."""
    with prefill_and_decode() as running:
        yield running


@pytest.fixture
def prefill(pair: list[Running]) -> Iterator[Running]:
    yield pair[0]
    pair[0].wait_idle()


@pytest.fixture
def decode(pair: list[Running]) -> Iterator[Running]:
    yield pair[1]
    pair[1].wait_idle()
