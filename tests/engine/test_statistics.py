"""What an engine measures of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from microserving.engine.books import Books
from microserving.engine.execution import StepResult
from microserving.engine.jobs import LoadSnapshot, StepTimes
from microserving.engine.pacing import Pacer
from microserving.engine.statistics import Statistics
from microserving.scheduler import Chunk, Scheduler, SchedulerConfig


def prompt_chunk(length: int, *, decode: bool = False) -> Chunk:
    sequence = SimpleNamespace(prompt_length=1000, computed_before=0)
    return cast(Chunk, SimpleNamespace(sequence=sequence, start=0, length=length, decode=decode))


def decode() -> Chunk:
    return prompt_chunk(1, decode=True)


def told(statistics: Statistics) -> LoadSnapshot:
    return statistics.snapshot(Scheduler(SchedulerConfig(8, 16, 512, 8, 8, 1.0, 1.0)))


def test_a_few_prompt_tokens_say_nothing_of_the_prefill_rate() -> None:
    """A decode engine behind a prefill engine computes one token of each prompt, in a decode's time."""
    statistics = Statistics()
    statistics.count_step([prompt_chunk(1)], 0.02, 0.02)
    assert told(statistics).prefill_tokens_per_s == 0.0, (
        "not known: 50 would keep a router from giving it anything more"
    )
    for _ in range(50):
        statistics.count_step([prompt_chunk(200)], 0.3, 0.4)
    assert told(statistics).prefill_tokens_per_s == pytest.approx(500)
    for _ in range(50):
        statistics.count_step([prompt_chunk(15)], 0.3, 0.3)
    assert told(statistics).prefill_tokens_per_s == pytest.approx(500)
    for _ in range(3):
        statistics.count_step([prompt_chunk(100)], 0.9, 1.0)
    assert 350 < told(statistics).prefill_tokens_per_s < 420  # 3 s at 100, of about 11.5 that count


def test_prompt_tokens_beside_decodes_take_what_the_step_is_longer() -> None:
    statistics = Statistics()
    statistics.count_step([decode(), prompt_chunk(15)], 0.05, 0.05)
    assert told(statistics).prefill_tokens_per_s == 0.0  # what decodes take is not known yet
    statistics.count_step([decode()], 0.008, 0.01)
    assert (told(statistics).decode_base_ms, told(statistics).decode_per_sequence_ms) == (
        pytest.approx(10),
        0.0,
    )
    statistics.count_step([decode(), prompt_chunk(1)], 0.02, 0.02)
    assert told(statistics).prefill_tokens_per_s == 0.0
    statistics.count_step([decode(), prompt_chunk(8)], 0.02, 0.03)
    assert told(statistics).prefill_tokens_per_s == pytest.approx(400)  # 8 in 0.02 s
    statistics.count_step([decode(), prompt_chunk(8)], 0.008, 0.008)  # quicker than decodes alone were
    assert told(statistics).prefill_tokens_per_s == pytest.approx(16 / 0.022, rel=1e-3)
    assert told(statistics).decode_step_ms == pytest.approx(118 / 5, rel=1e-2)


def test_how_much_longer_prompt_tokens_make_a_step_is_told() -> None:
    """Once it is known what decodes alone take, and of the same steps."""
    statistics = Statistics()
    for _ in range(50):
        statistics.count_step([decode(), prompt_chunk(40)], 0.1, 0.1)
    assert told(statistics).mixed_step_stretch == 0.0
    statistics.count_step([decode()], 0.04, 0.04)
    for _ in range(50):
        statistics.count_step([decode(), prompt_chunk(40)], 0.1, 0.1)
    assert told(statistics).mixed_step_stretch == pytest.approx(2.5, rel=1e-3)
    for _ in range(50):
        statistics.count_step([prompt_chunk(200)], 0.2, 0.2)
        statistics.count_step([decode()], 0.04, 0.04)
    assert told(statistics).mixed_step_stretch == pytest.approx(2.5, rel=1e-3)


def test_a_step_of_decodes_is_told_as_a_line() -> None:
    statistics = Statistics()
    for decodes in (1, 2, 4, 6) * 20:
        statistics.count_step([decode()] * decodes, 0.01, 0.01 + 0.004 * decodes)
    line = told(statistics)
    assert line.decode_base_ms == pytest.approx(10, rel=0.05)
    assert line.decode_per_sequence_ms == pytest.approx(4, rel=0.05)
    statistics.count_step([decode()] * 6 + [prompt_chunk(20)], 0.01, 0.01 + 0.024 + 0.04)
    assert told(statistics).prefill_tokens_per_s == pytest.approx(500, rel=0.05)


def test_what_passes_between_steps_counts_unless_it_is_a_stall() -> None:
    now = 0.0
    scheduler = Scheduler(SchedulerConfig(8, 16, 512, 8, 8, 1.0, 1.0))
    books = Books(scheduler, Pacer(2.5), 64, lambda: now)

    def step(model_s: float, whole_s: float) -> float:
        """Decodes alone; returns what they are told to take, in milliseconds."""
        nonlocal now
        now += whole_s
        books._count_step([decode()], StepTimes(0, round(model_s * 1e9), None))
        return told(books.statistics).decode_step_ms

    assert step(0.02, 5.0) == pytest.approx(20), "the engine slept before the first"
    books._since = now
    assert step(0.02, 0.04) == pytest.approx(30, rel=0.01)
    for _ in range(500):
        step(0.02, 0.03)
    assert step(0.02, 60.0) == pytest.approx(30, rel=0.05)
    assert books.statistics.timings().steps["decode"].total == pytest.approx(503 * 0.02)
    books.complete([], StepResult(StepTimes(0, 0, None), failed=True), [])
    assert books._since is None
