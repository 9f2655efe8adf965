# mypy: disable-error-code="untyped-decorator"
"""y = x @ w.T with float32 rows and packed weights: one arithmetic order for every row count, so every row is its own.

Owns: the kernels that read the tiles of ``kernels.tiles``. Does not know files, layers or models.

Order of a row: w[n, k] = fma(scale, code, bias) rounded to float32 (or the widened number), then one chain
acc = fma(x[k], w[k], acc) over ascending k from 0. A single row reads weights straight into the chain; several rows share
a tile that is widened once into scratch. The generated functions are long because they hold both paths.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

from microserving.engine.kernels.common import F32_LANES, I32_LANES, LANES, Expr, fma, splat
from microserving.engine.kernels.isa import Isa
from microserving.engine.kernels.tiles import CODE_BITS, GROUP, HEADER_BYTES, TILE_ROWS, MatmulShape, TileKind

_COLUMN_BLOCK = 512  # columns widened at once: 32 KiB of scratch
_ROW_BLOCK = 96  # rows of x that pass over one widened tile: they stay in the L2 cache from tile to tile
_CHUNKS = 64  # parallel pieces at most
_TILES_PER_CHUNK = 4  # at least


def _lane() -> Expr:
    return tirx.Ramp(0, 1, LANES)


def _splat_int(value: Expr | int) -> Expr:
    return tirx.Broadcast(tirx.IntImm("int32", value) if isinstance(value, int) else value, LANES)


def _bytes(tiles: Any, tile: Expr, group: Expr, start: Expr | int, count: int) -> Expr:
    return tiles[tile, group, tirx.Ramp(start, 1, count)]


def _half(tiles: Any, tile: Expr, group: Expr, start: Expr | int) -> Expr:
    """16 float16 numbers from byte ``start`` of an entry, widened."""
    return tirx.Cast(F32_LANES, tirx.reinterpret("float16x16", _bytes(tiles, tile, group, start, 32)))


def _word(kind: TileKind, tiles: Any, tile: Expr, group: Expr, block: Expr) -> Expr:
    """The bits (as int32 lanes) that hold the numbers of one block of columns: several of a quantised kind, else one."""
    if kind in CODE_BITS:
        return tirx.reinterpret(I32_LANES, _bytes(tiles, tile, group, HEADER_BYTES + block * 64, 64))
    if kind == "f32":
        return tirx.reinterpret(I32_LANES, _bytes(tiles, tile, group, block * 64, 64))
    if kind == "f16":
        return tirx.reinterpret(I32_LANES, _half(tiles, tile, group, block * 32))
    bits = tirx.reinterpret("uint16x16", _bytes(tiles, tile, group, block * 32, 32))
    return tirx.shift_left(tirx.Cast(I32_LANES, bits), _splat_int(16))


def _number(kind: TileKind, word: Expr, j: Expr, scale: Expr, bias: Expr) -> Expr:
    """Column j of a block, as float32."""
    if kind not in CODE_BITS:
        return tirx.reinterpret(F32_LANES, word)
    bits = CODE_BITS[kind]
    code = tirx.bitwise_and(tirx.shift_right(word, _splat_int(j * bits)), _splat_int(2**bits - 1))
    return fma(scale, tirx.Cast(F32_LANES, code), bias)


@functools.lru_cache(maxsize=256)
def matmul_kernel(shape: MatmulShape, isa: Isa) -> tirx.PrimFunc:
    """f(x float32 [m, columns], tiles uint8, y float32 [m, rows]); m may be 0.

    Raises ValueError when a quantised kind has columns that are not a multiple of 32.
    """
    kind, rows, columns = shape.kind, shape.rows, shape.columns
    affine = kind in CODE_BITS
    if affine and columns % GROUP:
        raise ValueError(f"{columns} columns of kind {kind} are not a multiple of {GROUP}")
    n_tiles, n_groups, entry = shape.tiles
    per_word = 32 // CODE_BITS[kind] if affine else 1
    tile_batch = min(2, n_tiles)  # two independent chains hide the latency of an FMA
    chunks, batches = chunks_of(n_tiles), -(-n_tiles // tile_batch)
    block_columns = min(_COLUMN_BLOCK, n_groups * GROUP)
    n_column_blocks, block_groups = -(-n_groups * GROUP // block_columns), block_columns // GROUP
    ragged_rows, last_rows, last_columns = rows % TILE_ROWS != 0, rows % TILE_ROWS, columns % GROUP

    @T.inline
    def load_affine(tiles, tile, group, affines, slot):  # type: ignore[no-untyped-def]
        affines[slot, 0, T.ramp(0, 1, LANES)] = _half(tiles, tile, group, 0)
        affines[slot, 1, T.ramp(0, 1, LANES)] = _half(tiles, tile, group, HEADER_BYTES // 2)

    @T.inline
    def store(y, row, tile, source, slot):  # type: ignore[no-untyped-def]
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
        def group_of(x, tiles, tile, g, n_words, acc, affines, words):  # type: ignore[no-untyped-def]
            if affine:
                for i in T.unroll(count):
                    load_affine(tiles, tile + i, g, affines, i)
            for b in T.serial(n_words):
                for i in T.unroll(count):
                    words[i, T.ramp(0, 1, LANES)] = _word(kind, tiles, tile + i, g, b)
                for j in T.unroll(per_word):
                    for i in T.unroll(count):
                        acc[i, T.ramp(0, 1, LANES)] = fma(
                            splat(x[0, g * GROUP + b * per_word + j]),
                            _number(
                                kind, words[i, _lane()], j, affines[i, 0, _lane()], affines[i, 1, _lane()]
                            ),
                            acc[i, T.ramp(0, 1, LANES)],
                        )

        @T.inline
        def run(x, tiles, y, tile, acc, affines, words, spill):  # type: ignore[no-untyped-def]
            for i in T.unroll(count):
                acc[i, T.ramp(0, 1, LANES)] = splat(0.0)
            for g in T.serial(columns // GROUP):
                group_of(x, tiles, tile, g, GROUP // per_word, acc, affines, words)
            if last_columns != 0:
                group_of(x, tiles, tile, columns // GROUP, last_columns, acc, affines, words)
            for i in T.unroll(count):
                spill[i, T.ramp(0, 1, LANES)] = acc[
                    i, T.ramp(0, 1, LANES)
                ]  # store() may index it by a variable
                store(y, 0, tile + i, spill, i)

        return run

    several_tiles, one_tile = single_row(tile_batch), single_row(1)

    @T.inline
    def widen(tiles, tile, group0, count, affines, words, scratch):  # type: ignore[no-untyped-def]
        for g in T.serial(count):
            if affine:
                load_affine(tiles, tile, group0 + g, affines, 0)
            for b in T.serial(GROUP // per_word):
                words[0, T.ramp(0, 1, LANES)] = _word(kind, tiles, tile, group0 + g, b)
                for j in T.unroll(per_word):
                    scratch[g * GROUP + b * per_word + j, T.ramp(0, 1, LANES)] = _number(
                        kind, words[0, _lane()], j, affines[0, 0, _lane()], affines[0, 1, _lane()]
                    )

    def blocks_of(count: Expr, size: int) -> Expr:
        """How many blocks of ``size`` rows; 8, 14, 20 ... rows end as 4 + 4, since 2 rows take as long as 4."""
        if size != 6:
            return count // size
        split = tirx.all(count % 6 == 2, count >= 8)
        return count // 6 - tirx.Select(split, tirx.IntImm("int64", 1), tirx.IntImm("int64", 0))

    def row_blocks(size: int, rest: Any) -> Any:
        """Blocks of ``size`` rows against the widened tile, then ``rest`` (if any) for what remains."""
        more = rest is not None

        @T.inline
        def run(x, scratch, sums, acc, row0, first, count, column0, n_columns):  # type: ignore[no-untyped-def]
            for b in T.serial(blocks_of(count, size)):
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
            if more:
                rest(
                    x,
                    scratch,
                    sums,
                    acc,
                    row0,
                    first + blocks_of(count, size) * size,
                    count - blocks_of(count, size) * size,
                    column0,
                    n_columns,
                )

        return run

    sizes = _block_sizes(isa)
    all_rows = functools.reduce(lambda rest, size: row_blocks(size, rest), reversed(sizes), None)

    @T.prim_func(s_tir=True, private=True)
    def matmul(x_handle: T.handle, w_handle: T.handle, y_handle: T.handle) -> None:
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
                    acc = T.sblock_alloc_buffer((tile_batch, LANES), "float32", scope="global")
                    affines = T.sblock_alloc_buffer((tile_batch, 2, LANES), "float32", scope="global")
                    spill = T.sblock_alloc_buffer((tile_batch, LANES), "float32", scope="global")
                    words = T.sblock_alloc_buffer((tile_batch, LANES), "int32", scope="global")
                    begin: T.let[T.int32] = chunk * batches // chunks * tile_batch
                    count: T.let[T.int32] = (
                        T.min((chunk + 1) * batches // chunks * tile_batch, n_tiles) - begin
                    )
                    for p in T.serial(count // tile_batch):
                        several_tiles(x, tiles, y, begin + p * tile_batch, acc, affines, words, spill)
                    for _ in T.serial(count % tile_batch):
                        one_tile(x, tiles, y, begin + count - 1, acc, affines, words, spill)
        else:
            for piece in T.parallel((m + (_ROW_BLOCK - 1)) // _ROW_BLOCK * chunks):
                with T.sblock("rows"):
                    T.reads()
                    T.writes()
                    scratch = T.sblock_alloc_buffer((block_columns, LANES), "float32", scope="global")
                    sums = T.sblock_alloc_buffer((_ROW_BLOCK, LANES), "float32", scope="global")
                    acc2 = T.sblock_alloc_buffer((sizes[0], LANES), "float32", scope="global")
                    affines2 = T.sblock_alloc_buffer((1, 2, LANES), "float32", scope="global")
                    words2 = T.sblock_alloc_buffer((1, LANES), "int32", scope="global")
                    chunk2: T.let[T.int32] = T.cast(piece % chunks, "int32")
                    row0: T.let[T.int64] = piece // chunks * _ROW_BLOCK
                    n_rows: T.let[T.int64] = T.min(T.int64(_ROW_BLOCK), m - row0)
                    for tile in T.serial(chunk2 * n_tiles // chunks, (chunk2 + 1) * n_tiles // chunks):
                        for r in T.serial(n_rows):
                            sums[r, T.ramp(0, 1, LANES)] = splat(0.0)
                        for cb in T.serial(n_column_blocks):
                            groups: T.let[T.int32] = T.min(block_groups, n_groups - cb * block_groups)
                            widen(tiles, tile, cb * block_groups, groups, affines2, words2, scratch)
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


def chunks_of(n_tiles: int) -> int:
    """Parallel pieces: a power of two, so that 2, 4, 8 ... threads get the same number of them."""
    wanted = max(1, min(_CHUNKS, n_tiles // _TILES_PER_CHUNK))
    return 1 << (wanted.bit_length() - 1)


def _block_sizes(isa: Isa) -> tuple[int, ...]:
    """Rows per register block, largest first, down to 1."""
    return tuple(
        size
        for size in (24, 8, 6, 4, 2, 1)
        if size <= isa.accumulators and (size != 6 or isa.accumulators < 8)
    )
