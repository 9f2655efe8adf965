"""Packed-weight matmuls against float64 numpy; every row equal to the row computed alone, bit for bit."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.engine.kernels.isa import detect_isa, make_isa
from microserving.engine.kernels.matmul import matmul_kernel
from microserving.engine.kernels.tiles import MatmulShape, TileKind
from microserving.engine.weights import pack_matrix, tile_kind
from microserving.errors import ModelLoadError
from microserving.model_files import Weight, WeightKind
from tests.engine.random_weights import random_weight

# kind, rows (no multiple of 16), columns (dense ones: no multiple of 32; 544 crosses a column block of 512)
CASES: list[tuple[WeightKind, int, int]] = [
    ("q4_1", 72, 544),
    ("q4_0", 16, 32),
    ("q8_0", 100, 64),
    ("f32", 33, 50),
    ("f16", 40, 530),
    ("bf16", 5, 7),
]
MAX_ROWS = 210


@lru_cache
def compiled(kind: WeightKind, rows: int, columns: int) -> tuple[Weight, Any, Any]:
    weight = random_weight("w", kind, (rows, columns), np.random.default_rng(rows), size=1.0)
    shape = MatmulShape(tile_kind([weight]), rows, columns)
    isa = detect_isa()
    kernel = matmul_kernel(shape, isa).with_attr("global_symbol", "matmul")
    target = tvm.target.Target(isa.target)
    with target:
        library = tvm.compile(tvm.IRModule({"matmul": kernel}), target)
    tiles = pack_matrix([weight])
    assert tiles.shape == shape.tiles
    return weight, library["matmul"], tvm.runtime.tensor(tiles)


def multiply(case: tuple[WeightKind, int, int], x: np.ndarray) -> np.ndarray:
    _, kernel, tiles = compiled(*case)
    y = tvm.runtime.tensor(np.full((len(x), case[1]), np.nan, np.float32))
    kernel(tvm.runtime.tensor(x), tiles, y)
    return y.numpy()


def rows_of(case: tuple[WeightKind, int, int]) -> np.ndarray:
    return np.random.default_rng(case[2]).standard_normal((MAX_ROWS, case[2])).astype(np.float32)


@lru_cache
def alone(case: tuple[WeightKind, int, int]) -> np.ndarray:
    return np.concatenate([multiply(case, row[None]) for row in rows_of(case)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_row_against_float64(case: tuple[WeightKind, int, int]) -> None:
    weight = compiled(*case)[0].dequantize().astype(np.float64)
    x = rows_of(case).astype(np.float64)
    bound = np.abs(x) @ np.abs(weight).T * (case[2] + 8) * 2.0**-24  # rounding of a chain of that length
    assert (np.abs(alone(case) - x @ weight.T) <= bound + 1e-30).all()


@settings(max_examples=30)
@given(case=st.sampled_from(CASES), first=st.integers(0, MAX_ROWS), count=st.integers(0, MAX_ROWS))
def test_a_row_does_not_depend_on_its_batch(
    case: tuple[WeightKind, int, int], first: int, count: int
) -> None:
    batch = slice(first, min(MAX_ROWS, first + count))
    assert np.array_equal(multiply(case, rows_of(case)[batch]), alone(case)[batch])


def test_zeros_of_padding_never_meet_the_sum() -> None:
    """Columns behind K are not read, even when the row's memory goes on with NaN (the next row)."""
    case = ("bf16", 5, 7)
    x = rows_of(case)[:2].copy()
    x[1] = np.nan
    assert np.array_equal(multiply(case, x)[0], alone(case)[0])


def test_other_register_blocks_give_the_same_bits() -> None:
    """The generic ISA blocks rows differently; the machine's own LLVM target is kept, so only the order could differ."""
    case = CASES[0]
    weight, _, tiles = compiled(*case)
    shape, isa = MatmulShape(tile_kind([weight]), *case[1:]), detect_isa()
    for other in (make_isa("avx512"), make_isa("generic")):
        kernel = matmul_kernel(shape, other).with_attr("global_symbol", "matmul")
        target = tvm.target.Target(isa.target)
        with target:
            function = tvm.compile(tvm.IRModule({"matmul": kernel}), target)["matmul"]
        x = rows_of(case)[:31]
        y = tvm.runtime.empty((len(x), case[1]), "float32")
        function(tvm.runtime.tensor(x), tiles, y)
        assert np.array_equal(y.numpy(), alone(case)[:31])


@pytest.mark.parametrize("kind", ["q4", "q8", "f16"])
def test_the_avx512_code_compiles_anywhere(kind: TileKind) -> None:
    isa = make_isa("avx512", frozenset({"avx512_vnni"}))
    kernel = matmul_kernel(MatmulShape(kind, 48, 64), isa).with_attr("global_symbol", "matmul")
    target = tvm.target.Target(isa.target)
    with target:
        code = tvm.compile(tvm.IRModule({"matmul": kernel}), target).mod.inspect_source("asm")
    assert "zmm" in code


def test_mixed_formats_are_stacked_without_loss() -> None:
    rng = np.random.default_rng(3)
    quantised = [random_weight("a", "q4_1", (16, 64), rng), random_weight("b", "q8_0", (8, 64), rng)]
    dense = random_weight("c", "bf16", (4, 64), rng)
    assert tile_kind(quantised) == "q8"
    assert tile_kind([quantised[0], random_weight("d", "q4_0", (8, 64), rng)]) == "q4"
    assert tile_kind([*quantised, dense]) == "f32"
    tiles = pack_matrix([*quantised, dense]).view(np.float32).reshape(2, 2, 32, 16)
    stacked = tiles.transpose(0, 3, 1, 2).reshape(32, 64)
    assert np.array_equal(stacked[:28], np.concatenate([w.dequantize() for w in (*quantised, dense)]))


def test_an_infinite_scale_is_refused_by_name() -> None:
    blocks = np.zeros((1, 20), np.uint8)
    blocks[0, :2] = np.array([np.inf], "<f2").view(np.uint8)
    with pytest.raises(ModelLoadError, match="layer 7"):
        pack_matrix([Weight("layer 7", "q4_1", (1, 32), blocks)])


def test_a_quantised_kind_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        matmul_kernel(MatmulShape("q4", 16, 40), detect_isa())
