"""What a step needs, counted by hand for a small model."""

from __future__ import annotations

from benchmarks.roofline import Machine, Need, step_need
from tests.engine.random_weights import RandomWeights, small_config

# Of small_config, per layer: q 96 x 96, k and v 32 x 96, o 96 x 96, gate and up 160 x 96, down 96 x 160.
LAYER = 2 * 96 * 96 + 2 * 32 * 96 + 3 * 160 * 96
HEAD = 100 * 96


def test_a_tied_model_reads_its_embedding_as_the_head() -> None:
    weights = RandomWeights(small_config(tied=True), ("q8_0",))
    need = step_need(weights, rows=3, context=10, logit_rows=1, sequences=2)
    assert need.multiply_adds == 3 * (2 * LAYER + 2 * 2 * 6 * 16 * 10) + HEAD
    assert need.nbytes == (2 * LAYER + HEAD) * 34 / 32 + 2 * (2 * 2 * 2 * 2 * 16 * 10)


def test_an_untied_embedding_is_not_read() -> None:
    weights = RandomWeights(small_config(tied=False), ("q8_0",))
    need = step_need(weights, rows=1, context=0, logit_rows=1, dense=True)
    assert need.multiply_adds == 2 * LAYER + HEAD
    assert need.nbytes == 4 * (2 * LAYER + HEAD)


def test_the_slower_of_memory_and_arithmetic_is_the_limit() -> None:
    machine = Machine(1e9, {"float32": 1e9, "int8": 4e9})
    assert Need(2e9, 4e9).seconds(machine, "float32") == 4.0
    assert Need(2e9, 4e9).seconds(machine, "int8") == 2.0
