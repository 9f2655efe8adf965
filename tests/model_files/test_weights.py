"""The block formats, against a scalar decoder written from the GGML documents."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.model_files import Weight
from microserving.model_files.weights import FORMATS, WeightKind


def decode_block(kind: str, block: bytes) -> list[float]:
    """One block of 32, number by number."""
    (d,) = struct.unpack_from("<e", block, 0)
    if kind == "q8_0":
        return [d * q for q in struct.unpack_from("<32b", block, 2)]
    m = struct.unpack_from("<e", block, 2)[0] if kind == "q4_1" else 0.0
    packed = block[4:] if kind == "q4_1" else block[2:]
    shift = 8 if kind == "q4_0" else 0
    out = [0.0] * 32
    for j in range(16):
        out[j] = d * ((packed[j] & 0x0F) - shift) + m
        out[j + 16] = d * ((packed[j] >> 4) - shift) + m
    return out


def quantised(kind: WeightKind, rows: int, blocks: int, seed: int) -> Weight:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, FORMATS[kind].size), dtype=np.uint8)
    scales = rng.standard_normal((rows, blocks, 2)).astype("<f2")
    raw[..., 0:2] = scales[..., :1].copy().view(np.uint8)
    if kind == "q4_1":
        raw[..., 2:4] = scales[..., 1:].copy().view(np.uint8)
    return Weight("w", kind, (rows, blocks * 32), raw.reshape(rows, -1))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_quantised_blocks_decode_as_documented(kind: WeightKind, rows: int, blocks: int, seed: int) -> None:
    weight = quantised(kind, rows, blocks, seed)
    raw = weight.rows.tobytes()
    size = FORMATS[kind].size
    expected = [x for i in range(0, len(raw), size) for x in decode_block(kind, raw[i : i + size])]
    np.testing.assert_array_equal(
        weight.dequantize(), np.array(expected, np.float32).reshape(weight.shape), strict=True
    )


@pytest.mark.parametrize(("kind", "largest"), [("q8_0", 255), ("q4_0", 15), ("q4_1", 15)])
def test_affine_form_has_the_promised_shapes_and_range(kind: WeightKind, largest: int) -> None:
    weight = quantised(kind, 8, 3, 1)
    codes, scale, bias = weight.affine()
    assert (codes.dtype, scale.dtype, bias.dtype) == (np.uint8, np.float32, np.float32)
    assert (codes.shape, scale.shape, bias.shape) == ((8, 96), (8, 3), (8, 3))
    assert codes.max() == largest
    rebuilt = codes * np.repeat(scale, 32, axis=1) + np.repeat(bias, 32, axis=1)
    np.testing.assert_array_equal(rebuilt, weight.dequantize())


def test_plain_kinds() -> None:
    values = np.array([[1.5, -2.25], [0.0, 65504.0]], np.float32)
    for kind, raw in (
        ("f32", values.astype("<f4").tobytes()),
        ("f16", values.astype("<f2").tobytes()),
        ("bf16", bytes.fromhex("c03f 10c0 0000 8047")),  # 65536 is the bfloat16 next to 65504
    ):
        weight = Weight("w", kind, (2, 2), np.frombuffer(raw, np.uint8).reshape(2, -1))  # type: ignore[arg-type]
        expected = [[1.5, -2.25], [0.0, 65536.0 if kind == "bf16" else 65504.0]]
        np.testing.assert_array_equal(weight.dequantize(), np.array(expected, np.float32), strict=True)
        with pytest.raises(ValueError, match="no affine form"):
            weight.affine()


def test_a_vector_has_one_row() -> None:
    raw = np.arange(4, dtype="<f4")
    weight = Weight("norm", "f32", (4,), raw.view(np.uint8).reshape(1, -1))
    values = weight.dequantize()
    np.testing.assert_array_equal(values, [0, 1, 2, 3])
    values[0] = 7  # a fresh array: nothing else changes
    assert raw[0] == 0
