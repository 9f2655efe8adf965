"""One tensor of a model as it lies in its file, and the interface of everything that tensors come from.

Owns the block formats (which bytes mean which number). Does not know containers, names or layers.
Block formats: ``ggml-quants`` of the GGML project; a block is 32 consecutive elements of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from microserving.model_files.model_config import ModelConfig

WeightKind = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"]

BLOCK_ELEMENTS = 32


class BlockFormat(NamedTuple):
    """``size`` bytes hold ``elements`` consecutive numbers of a row."""

    elements: int
    size: int


FORMATS: dict[WeightKind, BlockFormat] = {
    "f32": BlockFormat(1, 4),
    "f16": BlockFormat(1, 2),
    "bf16": BlockFormat(1, 2),
    "q8_0": BlockFormat(BLOCK_ELEMENTS, 34),  # f16 d, int8 q[32]
    "q4_0": BlockFormat(BLOCK_ELEMENTS, 18),  # f16 d, 32 nibbles
    "q4_1": BlockFormat(BLOCK_ELEMENTS, 20),  # f16 d, f16 m, 32 nibbles
}


class Affine(NamedTuple):
    """w[n, k] = scale[n, k // 32] * codes[n, k] + bias[n, k // 32].

    codes: uint8 [N, K], 0..15 (4-bit kinds) or 0..255; scale, bias: float32 [N, K / 32].
    """

    codes: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One tensor: shape (N, K) or (N,); a matrix maps x[K] to y[N] = w @ x.

    rows: uint8 [N, bytes per row] ([1, bytes] for a vector), little-endian, read-only and usually a view of the
    mapped file.
    """

    name: str
    kind: WeightKind
    shape: tuple[int, ...]
    rows: npt.NDArray[np.uint8]

    @property
    def is_quantised(self) -> bool:
        return FORMATS[self.kind].elements > 1

    def dequantize(self) -> npt.NDArray[np.float32]:
        """A fresh float32 array of ``shape``."""
        if self.is_quantised:
            codes, scale, bias = self.affine()
            blocks = codes.reshape(*scale.shape, BLOCK_ELEMENTS).astype(np.float32)
            values = blocks * scale[..., None] + bias[..., None]
        elif self.kind == "bf16":
            halves = np.ascontiguousarray(self.rows).view("<u2")
            values = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            floats = np.ascontiguousarray(self.rows).view("<f4" if self.kind == "f32" else "<f2")
            values = floats.astype(np.float32)
        return values.reshape(self.shape)

    def affine(self) -> Affine:
        """The exact affine form of a quantised tensor; raises ValueError for f32, f16 and bf16."""
        if not self.is_quantised:
            raise ValueError(f"{self.name} is {self.kind}, which has no affine form")
        size = FORMATS[self.kind].size
        count = self.rows.shape[0]
        blocks = self.rows.reshape(count, -1, size)
        scale = _half(blocks, 0)
        if self.kind == "q8_0":
            signed = blocks[..., 2:]
            return Affine((signed ^ np.uint8(0x80)).reshape(count, -1), scale, scale * np.float32(-128))
        if self.kind == "q4_0":
            return Affine(_nibbles(blocks[..., 2:]), scale, scale * np.float32(-8))
        return Affine(_nibbles(blocks[..., 4:]), scale, _half(blocks, 2))


def _half(blocks: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[np.float32]:
    """The f16 at byte ``offset`` of every block, as float32 [N, blocks]."""
    raw = np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2")
    return raw[..., 0].astype(np.float32)


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """uint8 [N, blocks, 16] -> [N, blocks * 32]: low nibbles are elements 0..15 of a block, high ones 16..31."""
    codes = np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)
    return codes.reshape(codes.shape[0], -1)


class WeightSource(Protocol):
    """All tensors of one model, under Hugging Face's canonical names, checked against the config when opened.

    Rows of q_proj and k_proj are always in NeoX order (first half, second half of each head).
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def model_hash(self) -> str:
        """Lower-case hex; equal in every process that loads the same numbers with the same config."""

    def names(self) -> Sequence[str]:
        """Every tensor's canonical name; ``lm_head.weight`` only when it is not tied to the embedding."""

    def weight(self, name: str) -> Weight:
        """The tensor of that name. ``lm_head.weight`` of a tied model is the embedding.

        Raises ModelLoadError for an unknown name, or when the file was cut after it was opened.
        """
