"""The small kernels of a layer against float64 numpy, and rows alone against rows in a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx

from microserving.engine.kernels.elementwise import (
    SERIAL_ROWS,
    add_rms_norm_kernel,
    embedding_kernel,
    last_norm_kernel,
    rms_norm_kernel,
    rope_kernel,
    silu_mul_kernel,
)
from microserving.engine.kernels.isa import detect_isa
from microserving.engine.kernels.tiles import MatmulShape
from microserving.engine.rope import RopeTable
from microserving.engine.weights import pack_matrix, tile_kind
from microserving.model_files import WeightKind
from tests.engine.random_weights import random_weight

ROWS = (1, SERIAL_ROWS, SERIAL_ROWS + 5)
EPS = 1e-5


def compiled(kernel: tirx.PrimFunc) -> Any:
    target = tvm.target.Target(detect_isa().target)
    with target:
        return tvm.compile(tvm.IRModule({"f": kernel.with_attr("global_symbol", "f")}), target)["f"]


def tensor(values: Any, dtype: str = "float32") -> Any:
    return tvm.runtime.tensor(np.ascontiguousarray(values, dtype))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def norm64(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPS) * weight


def test_rms_norm() -> None:
    kernel, weight = compiled(rms_norm_kernel(48, EPS)), normal(48, seed=1)
    x = normal(max(ROWS), 48)
    found = {}
    for count in ROWS:
        out = tensor(np.full((count, 48), np.nan))
        kernel(tensor(x[:count]), tensor(weight), out)
        found[count] = out.numpy()
        np.testing.assert_allclose(found[count], norm64(x[:count], weight), rtol=1e-5, atol=1e-6)
    assert np.array_equal(found[ROWS[2]][: ROWS[1]], found[ROWS[1]])
    assert np.array_equal(found[ROWS[2]][:1], found[1])


def test_add_rms_norm_changes_x_in_place() -> None:
    kernel, weight = compiled(add_rms_norm_kernel(48, EPS)), normal(48, seed=1)
    for count in ROWS:
        before, delta = normal(count, 48), normal(count, 48, seed=2)
        x, out = tensor(before), tensor(np.full((count, 48), np.nan))
        kernel(x, tensor(delta), tensor(weight), out)
        assert np.array_equal(x.numpy(), before + delta)
        np.testing.assert_allclose(out.numpy(), norm64(before + delta, weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [[], [3], [6, 0, 2]])
def test_last_norm_takes_the_wanted_rows(rows: list[int]) -> None:
    kernel, weight = compiled(last_norm_kernel(48, EPS)), normal(48, seed=1)
    x, delta = normal(7, 48), normal(7, 48, seed=2)
    out = tensor(np.full((len(rows), 48), np.nan))
    kernel(tensor(x), tensor(delta), tensor(rows, "int32"), tensor(weight), out)
    np.testing.assert_allclose(out.numpy(), norm64((x + delta)[rows], weight), rtol=1e-5, atol=1e-6)


def test_silu_mul_over_the_whole_range() -> None:
    kernel = compiled(silu_mul_kernel(32))
    gate = np.concatenate([np.linspace(-200, 200, 500), [0.0, -0.0, 1e-30, -1e-30]])[:, None] * np.ones(32)
    x = np.concatenate([gate, normal(len(gate), 32)], axis=1).astype(np.float32)
    out = tensor(np.full((len(x), 32), np.nan))
    kernel(tensor(x), out)
    g, up = x[:, :32].astype(np.float64), x[:, 32:]
    rtol = 8e-6  # exp(g) of a float32 product: |g| * 2**-24 relative, |g| < 70 where the result is above atol
    np.testing.assert_allclose(out.numpy(), g / (1 + np.exp(-g)) * up, rtol=rtol, atol=1e-26)
    alone = tensor(np.full((1, 32), np.nan))
    kernel(tensor(x[17:18]), alone)
    assert np.array_equal(alone.numpy()[0], out.numpy()[17])


@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_rope_rotates_halves(head_dim: int) -> None:
    """Complex numbers as the second way: (x1 + i x2) * exp(i * position * frequency)."""
    heads, kv_heads = 3, 2
    kernel, table = compiled(rope_kernel(heads, kv_heads, head_dim)), RopeTable(head_dim, 10000.0)
    for count in ROWS:
        positions = np.random.default_rng(count).integers(0, 5000, count).astype(np.int32)
        qkv = normal(count, heads + 2 * kv_heads, head_dim)
        outs = [tensor(np.full((count, n, head_dim), np.nan)) for n in (heads, kv_heads, kv_heads)]
        kernel(tensor(qkv.reshape(count, -1)), tensor(table.rows(positions)), *outs)
        half = head_dim // 2
        angle = positions[:, None, None] * 10000.0 ** (-np.arange(half) * 2 / head_dim)
        turned = (qkv[..., :half] + 1j * qkv[..., half:].astype(np.float64)) * np.exp(1j * angle)
        expected = np.concatenate([turned.real, turned.imag], axis=-1)
        np.testing.assert_allclose(outs[0].numpy(), expected[:, :heads], atol=2e-6)
        np.testing.assert_allclose(outs[1].numpy(), expected[:, heads : heads + kv_heads], atol=2e-6)
        assert np.array_equal(outs[2].numpy(), qkv[:, heads + kv_heads :])


def test_the_rope_table_is_the_same_however_it_grew() -> None:
    at_once, grown = RopeTable(64, 1e5), RopeTable(64, 1e5)
    for position in (0, 1500, 3000, 9000):
        grown.rows(np.array([position], np.int32))
    every = np.arange(9001, dtype=np.int32)
    assert np.array_equal(at_once.rows(every), grown.rows(every))
    assert at_once.rows(np.array([0], np.int32)).tolist() == [[1.0] * 32 + [0.0] * 32]


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "f32", "f16", "bf16"])
def test_embedding_rows_equal_the_dequantised_ones(kind: WeightKind) -> None:
    rows, columns = 37, 64
    weight = random_weight("e", kind, (rows, columns), np.random.default_rng(5), size=1.0)
    kernel = compiled(embedding_kernel(MatmulShape(tile_kind([weight]), rows, columns)))
    ids = np.arange(rows, dtype=np.int32)[::-1]
    out = tensor(np.full((rows, columns), np.nan))
    kernel(tensor(ids, "int32"), tvm.runtime.tensor(pack_matrix([weight])), out)
    np.testing.assert_allclose(out.numpy(), weight.dequantize()[ids], rtol=1e-6, atol=1e-6)
