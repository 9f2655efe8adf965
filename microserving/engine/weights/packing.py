"""From the tensors of a model file to the arrays that kernels read.

Owns: which tile kind a file's format becomes, and the byte order inside a tile (``kernels.tiles`` defines it). Does not
know names or layers. Nothing is rounded: a quantised value keeps its codes, its float16 scale and its float16 bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from microserving.engine.kernels.tiles import GROUP, TILE_ROWS, TileKind, entry_bytes
from microserving.errors import ModelLoadError
from microserving.model_files import Weight

_TILE_KINDS: dict[str, TileKind] = {
    "q4_0": "q4",
    "q4_1": "q4",
    "q8_0": "q8",
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
}
Bytes = npt.NDArray[np.uint8]


def tile_kind(weights: Sequence[Weight]) -> TileKind:
    """The kind that holds all of ``weights`` (stacked along their rows) without loss."""
    kinds = {_TILE_KINDS[weight.kind] for weight in weights}
    if len(kinds) == 1:
        return kinds.pop()
    return "q8" if kinds == {"q4", "q8"} else "f32"


def pack_matrix(weights: Sequence[Weight]) -> Bytes:
    """Matrices (N_i, K) stacked along N -> tiles uint8 [ceil(N / 16), ceil(K / 32), bytes] of ``tile_kind(weights)``.

    Raises ModelLoadError when a number is not finite, or a scale or bias no finite float16.
    """
    kind = tile_kind(weights)
    if kind in ("q4", "q8"):
        return _quantised_tiles(weights, kind)
    return _dense_tiles(weights, kind)


def pack_vector(weights: Sequence[Weight]) -> npt.NDArray[np.float32]:
    """The vectors of norms or biases one after another, as float32. Raises ModelLoadError when one is not finite."""
    return np.concatenate([_finite(weight, weight.dequantize()) for weight in weights])


def _quantised_tiles(weights: Sequence[Weight], kind: TileKind) -> Bytes:
    parts = [weight.affine() for weight in weights]
    codes = _padded(np.concatenate([part.codes for part in parts]))
    scale = _padded(_halves([part.scale for part in parts], weights))
    bias = _padded(_halves([part.bias for part in parts], weights))
    tiles, groups = codes.shape[0] // TILE_ROWS, codes.shape[1] // GROUP
    packed = np.empty((tiles, groups, entry_bytes(kind)), np.uint8)
    packed[..., 0:32] = _header(scale)
    packed[..., 32:64] = _header(bias)
    packed[..., 64:] = _words(codes, kind)
    return packed


def _words(codes: Bytes, kind: TileKind) -> Bytes:
    """codes [N, K] -> bytes [tiles, groups, rest of the entry]: little-endian words of one row each."""
    tiles, groups = codes.shape[0] // TILE_ROWS, codes.shape[1] // GROUP
    if kind == "q4":
        codes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    words = codes.view("<u4").reshape(tiles, TILE_ROWS, groups, -1)
    return np.ascontiguousarray(words.transpose(0, 2, 3, 1)).reshape(tiles, groups, -1).view(np.uint8)


def _halves(parts: Sequence[npt.NDArray[np.float32]], weights: Sequence[Weight]) -> npt.NDArray[np.float16]:
    whole = np.concatenate(parts)
    with np.errstate(over="ignore", invalid="ignore"):
        halves = whole.astype(np.float16)
    if not (np.isfinite(halves).all() and np.array_equal(halves.astype(np.float32), whole)):
        names = ", ".join(weight.name for weight in weights)
        raise ModelLoadError(f"{names}: a quantisation scale or bias is no finite float16")
    return halves


def _header(values: npt.NDArray[np.float16]) -> Bytes:
    """[N, groups] -> the 16 numbers of each (tile, group) as bytes [tiles, groups, 32]."""
    tiles = values.reshape(-1, TILE_ROWS, values.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(tiles).view(np.uint8)


def _dense_tiles(weights: Sequence[Weight], kind: TileKind) -> Bytes:
    matrix = np.concatenate([_dense(weight, kind) for weight in weights])
    columns = matrix.shape[1]
    matrix = np.pad(matrix, ((0, -matrix.shape[0] % TILE_ROWS), (0, -columns % GROUP)))
    tiles, groups = matrix.shape[0] // TILE_ROWS, matrix.shape[1] // GROUP
    ordered = matrix.reshape(tiles, TILE_ROWS, groups, GROUP).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(ordered).reshape(tiles, groups, -1).view(np.uint8)


def _finite(weight: Weight, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``values``. Raises ModelLoadError when one of them is NaN or infinite."""
    if not np.isfinite(values).all():
        raise ModelLoadError(f"tensor {weight.name!r} holds a number that is not finite")
    return values


def _dense(weight: Weight, kind: TileKind) -> npt.NDArray[Any]:
    if kind == "f32":
        return _finite(weight, weight.dequantize())
    if weight.kind == "f16":
        _finite(weight, np.ascontiguousarray(weight.rows).view("<f2"))
    else:
        _finite(weight, weight.dequantize())
    return np.ascontiguousarray(weight.rows).view("<u2").reshape(weight.shape)  # f16 and bf16 as they are


def _padded(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Zero rows up to a multiple of 16."""
    missing = -rows.shape[0] % TILE_ROWS
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows
