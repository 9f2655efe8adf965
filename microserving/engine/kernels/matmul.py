# mypy: disable-error-code="untyped-decorator"
"""y = x @ w.T with float32 rows and packed weights: one arithmetic order for every row count, so every row is its own.

Owns: the tile format of packed weights and the kernels that read it. Does not know files, layers or models.

Tile format: uint8 [ceil(N / 16), ceil(K / 32), bytes]. One entry holds 16 output rows x 32 input columns:
  q4   16 float16 scales, 16 float16 biases, 16 x 16 bytes (byte [j, r]: column 2j of row r in the low nibble, 2j+1 high)
  q8   16 float16 scales, 16 float16 biases, 32 x 16 bytes (byte [k, r])
  f32, f16, bf16   [32, 16] numbers (column, row)
Rows beyond N and columns beyond K are packed as zeros; columns beyond K are never read into a sum.

Order of a row: w[n, k] = fma(scale, code, bias) rounded to float32 (or the widened number), then one chain
acc = fma(x[k], w[k], acc) over ascending k from 0. A single row reads weights straight into the chain; several rows share
a tile that is widened once into scratch. The generated functions are long because they hold both paths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tvm import tirx
from tvm.script import tirx as T

from microserving.engine.kernels.common import F32_LANES, I32_LANES, LANES, Expr, Isa, fma, splat

TileKind = Literal["q4", "q8", "f32", "f16", "bf16"]
TILE_ROWS = LANES
GROUP = 32
"""Input columns of one tile entry; the quantisation group of q4 and q8."""
HEADER_BYTES = {"q4": 64, "q8": 64, "f32": 0, "f16": 0, "bf16": 0}
ENTRY_BYTES = {"q4": 320, "q8": 576, "f32": 2048, "f16": 1024, "bf16": 1024}

_COLUMN_BLOCK = 512  # columns widened at once: 32 KiB of scratch
_ROW_BLOCK = 96  # rows of x that pass over one widened tile: they stay in the L2 cache from tile to tile
_CHUNKS = 64  # parallel pieces at most (each at least two tiles): load balance on many cores


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """y[m, rows] = x[m, columns] @ w.T for any m."""

    kind: TileKind
    rows: int
    columns: int

    @property
    def tiles(self) -> tuple[int, int, int]:
        """The shape of the packed weight (uint8)."""
        return (-(-self.rows // TILE_ROWS), -(-self.columns // GROUP), ENTRY_BYTES[self.kind])


def _lane() -> Expr:
    return tirx.Ramp(0, 1, LANES)


def _bytes(tiles: Any, tile: Expr, group: Expr, start: Expr | int, count: int) -> Expr:
    return tiles[tile, group, tirx.Ramp(start, 1, count)]


def _code_q4(tiles: Any, tile: Expr, group: Expr, step: Expr, half: int) -> Expr:
    pair = tirx.Cast(I32_LANES, _bytes(tiles, tile, group, 64 + step * LANES, LANES))
    if half == 0:
        return tirx.Cast(F32_LANES, tirx.bitwise_and(pair, tirx.Broadcast(tirx.IntImm("int32", 15), LANES)))
    return tirx.Cast(F32_LANES, tirx.shift_right(pair, tirx.Broadcast(tirx.IntImm("int32", 4), LANES)))


def _code_q8(tiles: Any, tile: Expr, group: Expr, step: Expr, _half: int) -> Expr:
    return tirx.Cast(F32_LANES, tirx.Cast(I32_LANES, _bytes(tiles, tile, group, 64 + step * LANES, LANES)))


def _code_f32(tiles: Any, tile: Expr, group: Expr, step: Expr, _half: int) -> Expr:
    return tirx.reinterpret(F32_LANES, _bytes(tiles, tile, group, step * 64, 64))


def _code_f16(tiles: Any, tile: Expr, group: Expr, step: Expr, _half: int) -> Expr:
    return _widened_half(tiles, tile, group, step * 32)


def _code_bf16(tiles: Any, tile: Expr, group: Expr, step: Expr, _half: int) -> Expr:
    bits = tirx.reinterpret("uint16x16", _bytes(tiles, tile, group, step * 32, 32))
    shift = tirx.Broadcast(tirx.IntImm("uint32", 16), LANES)
    return tirx.reinterpret(F32_LANES, tirx.shift_left(tirx.Cast("uint32x16", bits), shift))


def _widened_half(tiles: Any, tile: Expr, group: Expr, start: Expr | int) -> Expr:
    return tirx.Cast(F32_LANES, tirx.reinterpret("float16x16", _bytes(tiles, tile, group, start, 32)))


_CODES: dict[str, Callable[[Any, Expr, Expr, Expr, int], Expr]] = {
    "q4": _code_q4,
    "q8": _code_q8,
    "f32": _code_f32,
    "f16": _code_f16,
    "bf16": _code_bf16,
}


@functools.lru_cache(maxsize=256)
def matmul_kernel(shape: MatmulShape, isa: Isa) -> tirx.PrimFunc:
    """f(x float32 [m, columns], tiles uint8, y float32 [m, rows]); m may be 0.

    Raises ValueError when a quantised kind has columns that are not a multiple of 32.
    """
    kind, rows, columns = shape.kind, shape.rows, shape.columns
    affine = kind in ("q4", "q8")
    if affine and columns % GROUP:
        raise ValueError(f"{columns} columns of kind {kind} are not a multiple of {GROUP}")
    n_tiles, n_groups, entry = shape.tiles
    paired = kind == "q4"
    steps = GROUP // 2 if paired else GROUP
    tile_batch = 2 if n_tiles > 1 else 1  # two independent chains hide the latency of an FMA
    chunks = max(1, min(_CHUNKS, n_tiles // 2))
    block_columns = min(_COLUMN_BLOCK, n_groups * GROUP)
    n_column_blocks, block_groups = -(-n_groups * GROUP // block_columns), block_columns // GROUP
    ragged_rows, last_rows, whole_groups = rows % TILE_ROWS != 0, rows % TILE_ROWS, columns % GROUP == 0
    code = _CODES[kind]

    def weight(
        tiles: Any, tile: Expr, group: Expr, step: Expr, half: int, affines: Any, slot: Expr | int
    ) -> Expr:
        value = code(tiles, tile, group, step, half)
        return fma(affines[slot, 0, _lane()], value, affines[slot, 1, _lane()]) if affine else value

    @T.inline
    def load_affine(tiles, tile, group, affines, slot):
        affines[slot, 0, T.ramp(0, 1, LANES)] = _widened_half(tiles, tile, group, 0)
        affines[slot, 1, T.ramp(0, 1, LANES)] = _widened_half(tiles, tile, group, 32)

    @T.inline
    def store(y, row, tile, source, slot):
        if ragged_rows:
            if tile * TILE_ROWS + TILE_ROWS <= rows:
                y[row, T.ramp(tile * TILE_ROWS, 1, LANES)] = source[slot, T.ramp(0, 1, LANES)]
            else:
                for j in T.serial(last_rows):
                    y[row, tile * TILE_ROWS + j] = source[slot, j]
        else:
            y[row, T.ramp(tile * TILE_ROWS, 1, LANES)] = source[slot, T.ramp(0, 1, LANES)]

    def single_row(count: int) -> Any:
        """One row of x against ``count`` neighbouring tiles; the accumulators are registers."""

        @T.inline
        def run(x, tiles, y, tile, acc, affines, spill):
            for i in T.unroll(count):
                acc[i, T.ramp(0, 1, LANES)] = splat(0.0)
            for g in T.serial(n_groups):
                if affine:
                    for i in T.unroll(count):
                        load_affine(tiles, tile + i, g, affines, i)
                for j in T.serial(steps if whole_groups else T.min(GROUP, columns - g * GROUP)):
                    if paired:
                        for i in T.unroll(count):
                            acc[i, T.ramp(0, 1, LANES)] = fma(
                                splat(x[0, g * GROUP + j * 2]),
                                weight(tiles, tile + i, g, j, 0, affines, i),
                                acc[i, T.ramp(0, 1, LANES)],
                            )
                        for i in T.unroll(count):
                            acc[i, T.ramp(0, 1, LANES)] = fma(
                                splat(x[0, g * GROUP + j * 2 + 1]),
                                weight(tiles, tile + i, g, j, 1, affines, i),
                                acc[i, T.ramp(0, 1, LANES)],
                            )
                    else:
                        for i in T.unroll(count):
                            acc[i, T.ramp(0, 1, LANES)] = fma(
                                splat(x[0, g * GROUP + j]),
                                weight(tiles, tile + i, g, j, 0, affines, i),
                                acc[i, T.ramp(0, 1, LANES)],
                            )
            for i in T.unroll(count):
                spill[i, T.ramp(0, 1, LANES)] = acc[
                    i, T.ramp(0, 1, LANES)
                ]  # store() may index it by a variable
                store(y, 0, tile + i, spill, i)

        return run

    several_tiles, one_tile = single_row(tile_batch), single_row(1)

    @T.inline
    def widen(tiles, tile, group0, count, affines, scratch):
        for g in T.serial(count):
            if affine:
                load_affine(tiles, tile, group0 + g, affines, 0)
            for j in T.serial(steps):
                if paired:
                    scratch[g * GROUP + j * 2, T.ramp(0, 1, LANES)] = weight(
                        tiles, tile, group0 + g, j, 0, affines, 0
                    )
                    scratch[g * GROUP + j * 2 + 1, T.ramp(0, 1, LANES)] = weight(
                        tiles, tile, group0 + g, j, 1, affines, 0
                    )
                else:
                    scratch[g * GROUP + j, T.ramp(0, 1, LANES)] = weight(
                        tiles, tile, group0 + g, j, 0, affines, 0
                    )

    def row_blocks(size: int, rest: Any) -> Any:
        """Blocks of ``size`` rows against the widened tile, then ``rest`` for what remains."""

        @T.inline
        def run(x, scratch, sums, acc, row0, first, count, column0, n_columns):
            for b in T.serial(count // size):
                for r in T.unroll(size):
                    acc[r, T.ramp(0, 1, LANES)] = sums[first + b * size + r, T.ramp(0, 1, LANES)]
                for k in T.serial(n_columns):
                    for r in T.unroll(size):
                        acc[r, T.ramp(0, 1, LANES)] = fma(
                            splat(x[row0 + (first + b * size + r), column0 + k]),
                            scratch[k, T.ramp(0, 1, LANES)],
                            acc[r, T.ramp(0, 1, LANES)],
                        )
                for r in T.unroll(size):
                    sums[first + b * size + r, T.ramp(0, 1, LANES)] = acc[r, T.ramp(0, 1, LANES)]
            rest(x, scratch, sums, acc, row0, first + count // size * size, count % size, column0, n_columns)

        return run

    @T.inline
    def no_rows(x, scratch, sums, acc, row0, first, count, column0, n_columns):
        T.evaluate(0)

    sizes = _block_sizes(isa)
    all_rows = functools.reduce(lambda rest, size: row_blocks(size, rest), reversed(sizes), no_rows)

    @T.prim_func(s_tir=True, private=True)
    def matmul(x_handle: T.handle, w_handle: T.handle, y_handle: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        m = T.int64()
        x = T.match_buffer(x_handle, (m, columns), "float32")
        tiles = T.match_buffer(w_handle, (n_tiles, n_groups, entry), "uint8")
        y = T.match_buffer(y_handle, (m, rows), "float32")
        if m == T.int64(1):
            for chunk in T.parallel(chunks):
                with T.sblock("row"):
                    T.reads()
                    T.writes()
                    acc = T.sblock_alloc_buffer((tile_batch, LANES), "float32", scope="local")
                    affines = T.sblock_alloc_buffer((tile_batch, 2, LANES), "float32", scope="local")
                    spill = T.sblock_alloc_buffer((tile_batch, LANES), "float32", scope="local")
                    begin: T.let[T.int32] = chunk * n_tiles // chunks
                    count: T.let[T.int32] = (chunk + 1) * n_tiles // chunks - begin
                    for p in T.serial(count // tile_batch):
                        several_tiles(x, tiles, y, begin + p * tile_batch, acc, affines, spill)
                    for p in T.serial(count % tile_batch):
                        one_tile(
                            x, tiles, y, begin + count // tile_batch * tile_batch + p, acc, affines, spill
                        )
        else:
            for piece in T.parallel((m + (_ROW_BLOCK - 1)) // _ROW_BLOCK * chunks):
                with T.sblock("rows"):
                    T.reads()
                    T.writes()
                    scratch = T.sblock_alloc_buffer((block_columns, LANES), "float32", scope="local")
                    sums = T.sblock_alloc_buffer((_ROW_BLOCK, LANES), "float32", scope="local")
                    acc2 = T.sblock_alloc_buffer((sizes[0], LANES), "float32", scope="local")
                    affines2 = T.sblock_alloc_buffer((1, 2, LANES), "float32", scope="local")
                    chunk2: T.let[T.int32] = T.cast(piece % chunks, "int32")
                    row0: T.let[T.int64] = piece // chunks * _ROW_BLOCK
                    n_rows: T.let[T.int64] = T.min(T.int64(_ROW_BLOCK), m - row0)
                    for tile in T.serial(chunk2 * n_tiles // chunks, (chunk2 + 1) * n_tiles // chunks):
                        for r in T.serial(n_rows):
                            sums[r, T.ramp(0, 1, LANES)] = splat(0.0)
                        for cb in T.serial(n_column_blocks):
                            widen(
                                tiles,
                                tile,
                                cb * block_groups,
                                T.min(block_groups, n_groups - cb * block_groups),
                                affines2,
                                scratch,
                            )
                            all_rows(
                                x,
                                scratch,
                                sums,
                                acc2,
                                row0,
                                T.int64(0),
                                n_rows,
                                cb * block_columns,
                                T.min(block_columns, columns - cb * block_columns),
                            )
                        for r in T.serial(n_rows):
                            store(y, row0 + r, tile, sums, r)

    return matmul


def _block_sizes(isa: Isa) -> tuple[int, ...]:
    """Rows per register block, largest first, down to 1."""
    return tuple(
        size
        for size in (24, 8, 6, 4, 2, 1)
        if size <= isa.accumulators and (size != 6 or isa.accumulators < 8)
    )
