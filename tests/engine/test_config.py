"""What an engine's configuration refuses: values that a running engine could not count with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from microserving.engine.config import EngineConfig


@pytest.mark.parametrize(
    "field", ["max_itl_ratio", "reserve_wait_s", "lease_ttl_s", "transfer_timeout_s", "memory_threshold"]
)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_numbers_that_are_none_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValidationError) as refused:
        EngineConfig(**{field: value})
    assert [error["loc"] for error in refused.value.errors()] == [(field,)]


@pytest.mark.parametrize("field", ["reserve_wait_s", "lease_ttl_s", "transfer_timeout_s"])
def test_a_wait_that_no_clock_can_count_is_refused(field: str) -> None:
    assert getattr(EngineConfig(**{field: 3600.0}), field) == 3600.0
    with pytest.raises(ValidationError):
        EngineConfig(**{field: 1e300})


def test_readme_tells_the_defaults() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([0-9.]+) \|", readme, re.MULTILINE)
    assert len(rows) >= 10
    config = EngineConfig()
    for flag, default in rows:
        assert getattr(config, flag.replace("-", "_")) == float(default), flag
