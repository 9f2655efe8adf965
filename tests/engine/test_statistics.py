"""What an engine measures of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from microserving.engine.statistics import Statistics
from microserving.scheduler import Chunk


def prompt_chunk(length: int, *, decode: bool = False) -> Chunk:
    sequence = SimpleNamespace(prompt_length=1000, computed_before=0)
    return cast(Chunk, SimpleNamespace(sequence=sequence, start=0, length=length, decode=decode))


def decode() -> Chunk:
    return prompt_chunk(1, decode=True)


def test_a_few_prompt_tokens_say_nothing_of_the_prefill_rate() -> None:
    """A decode engine behind a prefill engine computes one token of each prompt, in a decode's time."""
    statistics = Statistics()
    statistics.count_step([prompt_chunk(1)], 0.02)
    assert statistics.prefill_tokens_per_s == 0.0, (
        "not known: 50 would keep a router from giving it anything more"
    )
    for _ in range(50):
        statistics.count_step([prompt_chunk(200)], 0.4)
    assert statistics.prefill_tokens_per_s == pytest.approx(500, rel=1e-3)
    for _ in range(50):
        statistics.count_step([prompt_chunk(15)], 0.3)
    assert statistics.prefill_tokens_per_s == pytest.approx(500, rel=1e-3)
    statistics.count_step([prompt_chunk(8), prompt_chunk(8)], 0.16)
    assert statistics.prefill_tokens_per_s == pytest.approx(400, rel=1e-3)  # a quarter of the way to 100


def test_prompt_tokens_beside_decodes_take_what_the_step_is_longer() -> None:
    statistics = Statistics()
    statistics.count_step([decode(), prompt_chunk(15)], 0.05)
    assert statistics.prefill_tokens_per_s == 0.0  # what decodes take is not known yet
    statistics.count_step([decode()], 0.01)
    statistics.count_step([decode(), prompt_chunk(1)], 0.02)
    assert statistics.prefill_tokens_per_s == 0.0
    statistics.count_step([decode(), prompt_chunk(8)], 0.03)
    assert statistics.prefill_tokens_per_s == pytest.approx(400)  # 8 in 0.02 s
    statistics.count_step([decode(), prompt_chunk(8)], 0.008)  # quicker than decodes alone were
    assert statistics.prefill_tokens_per_s == pytest.approx(400 + (8 / 0.002 - 400) / 4)
    assert statistics.decode_step_ms > 0
