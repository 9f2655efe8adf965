"""The tile format of packed weights, and the shape of a product with one. Imports no TVM.

Tile format: uint8 [ceil(N / 16), ceil(K / 32), bytes]. One entry holds 16 output rows x 32 input columns:
  q4   16 float16 scales, 16 float16 biases, uint32 [4, 16]: nibble j of word [b, r] is the code of column 8b + j, row r
  q8   16 float16 scales, 16 float16 biases, uint32 [8, 16]: byte j of word [b, r] is the code of column 4b + j, row r
  f32, f16, bf16   [32, 16] numbers (column, row)
A word per row keeps the codes in their 32-bit lane: a shift, a mask and a conversion, no shuffle. Rows beyond N and columns
beyond K are packed as zeros; columns beyond K are never read into a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TileKind = Literal["q4", "q8", "f32", "f16", "bf16"]
TILE_ROWS = 16
"""Output rows of one tile entry: the lanes of a vector."""
GROUP = 32
"""Input columns of one tile entry; the quantisation group of q4 and q8."""
HEADER_BYTES = 64  # of q4 and q8: scales, then biases
CODE_BITS: dict[str, int] = {"q4": 4, "q8": 8}
NUMBER_BYTES: dict[str, int] = {"f32": 4, "f16": 2, "bf16": 2}


def entry_bytes(kind: TileKind) -> int:
    """Bytes of one 16 x 32 entry."""
    if kind in CODE_BITS:
        return HEADER_BYTES + TILE_ROWS * GROUP * CODE_BITS[kind] // 8
    return TILE_ROWS * GROUP * NUMBER_BYTES[kind]


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """y[m, rows] = x[m, columns] @ w.T for any m."""

    kind: TileKind
    rows: int
    columns: int

    @property
    def tiles(self) -> tuple[int, int, int]:
        """The shape of the packed weight (uint8)."""
        return (-(-self.rows // TILE_ROWS), -(-self.columns // GROUP), entry_bytes(self.kind))
