# mypy: disable-error-code="untyped-decorator"
"""y = x @ w.T with activations of 8 bits and packed 4- or 8-bit weights: exact integer sums within a group of 32 columns.

Owns: the kernel that reads ``matmul``'s tiles of kind q4 and q8, and quantised rows as ``quantise`` writes them. It does not
know files, layers or models. The scheme is llama.cpp's (Q4_x and Q8_0 weights times Q8_1 rows).

Order of a row: y = products + biases, two chains over ascending groups g from 0:
  products = fma(scale_w[n, g] * scale_x[m, g], float(sum of code_w * code_x), products)
  biases = fma(bias_w[n, g], scale_x[m, g] * float(sum of code_x), biases)
Integer sums are exact, so their order is free: every ISA has its own (``Dot``), and all give the same bits.

A quad is 4 columns of 16 weight rows: 64 bytes, row r in 32-bit lane r. ``column_order`` says which columns: nibbles of a word
that lie in the same half of their bytes make a quad of q4, so that a mask unpacks it. A single row reads the packed tiles;
several rows share a group of a tile that is unpacked once.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

from microserving.engine.kernels.common import F32_LANES, I32_LANES, LANES, Expr, fma, splat
from microserving.engine.kernels.isa import Isa
from microserving.engine.kernels.matmul import chunks_of
from microserving.engine.kernels.tiles import CODE_BITS, GROUP, HEADER_BYTES, MatmulShape, TileKind

QUADS = GROUP // 4
_QUAD_BYTES = 4 * LANES
_FINISH_ROWS = 4  # rows that get their biases at once, to hide the latency of an FMA
_ROW_BLOCK = 96  # rows of x that pass over one unpacked tile
_LINE = 64  # bytes of a cache line
_LOW_NIBBLES = 0x0F0F0F0F


def column_order(kind: TileKind) -> list[int]:
    """The columns of a group in the order in which a quantised row for weights of ``kind`` holds them: quad after quad."""
    if kind == "q4":
        return [8 * block + 2 * i + half for block in range(4) for half in range(2) for i in range(4)]
    return list(range(GROUP))


class Dot(ABC):
    """Sums of products of unsigned codes and signed 8-bit activations. ``parts`` accumulators hold one row of a tile."""

    parts: int
    dtype: str  # of an element of an accumulator
    lanes: int
    planes: ClassVar[
        Mapping[str, int]
    ]  # accumulations per kind: 2 = the halves of an 8-bit code, one after the other
    rows: tuple[int, ...]  # of register blocks, largest first, down to 1
    signed: ClassVar[bool] = (
        False  # codes less 128 are multiplied: the sum of a group lacks 128 times that of its x
    )

    @abstractmethod
    def step(self, acc: Expr, codes: Expr, quad: Expr) -> Expr:
        """acc + the products of a part of a quad. codes: uint8 of 64 / parts lanes; quad: 4 activations as an int32."""

    @abstractmethod
    def total(self, accs: Sequence[Expr], factor: int) -> Expr:
        """int32x16: the sum of each row, times ``factor``."""

    @property
    def zero(self) -> Expr:
        return tirx.Broadcast(tirx.IntImm(self.dtype, 0), self.lanes)

    @property
    def bytes(self) -> int:
        return _QUAD_BYTES // self.parts


class Vnni(Dot):
    """AVX-512 VNNI: u8 x s8 products added to int32 lanes four at a time."""

    parts, dtype, lanes, rows = 1, "int32", 16, (12, 8, 4, 2, 1)
    planes: ClassVar[Mapping[str, int]] = {"q4": 1, "q8": 1}

    def step(self, acc: Expr, codes: Expr, quad: Expr) -> Expr:
        x = tirx.reinterpret("uint8x64", tirx.Broadcast(quad, LANES))
        return tirx.call_llvm_pure_intrin(I32_LANES, "llvm.x86.avx512.vpdpbusd.512", acc, codes, x)

    def total(self, accs: Sequence[Expr], factor: int) -> Expr:
        return accs[0] if factor == 1 else accs[0] * tirx.Broadcast(tirx.IntImm("int32", factor), LANES)


class Madd(Dot):
    """pmaddubsw: pairs of u8 x s8 added in int16. Codes of 4 bits cannot saturate it: 8 quads * 2 * 15 * 127 < 2**15."""

    dtype = "int16"
    planes: ClassVar[Mapping[str, int]] = {"q4": 1, "q8": 2}

    def __init__(self, parts: int, rows: tuple[int, ...], multiply: str, widen: str) -> None:
        self.parts, self.lanes, self.rows = parts, 32 // parts, rows
        self._multiply, self._widen = multiply, widen

    def step(self, acc: Expr, codes: Expr, quad: Expr) -> Expr:
        x = tirx.reinterpret(f"uint8x{self.bytes}", tirx.Broadcast(quad, self.bytes // 4))
        return acc + tirx.call_llvm_pure_intrin(f"int16x{self.lanes}", self._multiply, codes, x)

    def total(self, accs: Sequence[Expr], factor: int) -> Expr:
        factors = tirx.Broadcast(tirx.IntImm("int16", factor), self.lanes)
        sums = [
            tirx.call_llvm_pure_intrin(f"int32x{self.lanes // 2}", self._widen, acc, factors) for acc in accs
        ]
        return sums[0] if len(sums) == 1 else tirx.Shuffle(sums, list(range(LANES)))


class SignedMadd(Dot):
    """Codes of 8 bits, less 128, on AVX2: |w| * (x with w's sign), in pairs that stay in int16: 2 * 128 * 127 < 2**15."""

    parts, dtype, lanes, rows, signed = 2, "int32", 8, (4, 2, 1), True
    planes: ClassVar[Mapping[str, int]] = {"q8": 1}

    def step(self, acc: Expr, codes: Expr, quad: Expr) -> Expr:
        def sign(value: Expr, by: Expr) -> Expr:
            return tirx.call_llvm_pure_intrin("uint8x32", "llvm.x86.avx2.psign.b", value, by)

        x = sign(tirx.reinterpret("uint8x32", tirx.Broadcast(quad, 8)), codes)
        pairs = tirx.call_llvm_pure_intrin("int16x16", "llvm.x86.avx2.pmadd.ub.sw", sign(codes, codes), x)
        ones = tirx.Broadcast(tirx.IntImm("int16", 1), 16)
        return acc + tirx.call_llvm_pure_intrin("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, ones)

    def total(self, accs: Sequence[Expr], factor: int) -> Expr:  # noqa: ARG002 - one plane: always 1
        return tirx.Shuffle(list(accs), list(range(LANES)))


class Plain(Dot):
    """Plain vector code: even and odd bytes are multiplied as int16, with the bound of ``Madd``."""

    parts, dtype, lanes, rows = 1, "int16", 32, (2, 1)
    planes: ClassVar[Mapping[str, int]] = {"q4": 1, "q8": 2}

    def step(self, acc: Expr, codes: Expr, quad: Expr) -> Expr:
        def shift(value: Expr, bits: int, *, left: bool = False) -> Expr:
            by = tirx.Broadcast(tirx.IntImm("int16", bits), 32)
            return tirx.shift_left(value, by) if left else tirx.shift_right(value, by)

        w = tirx.reinterpret("int16x32", codes)
        x = tirx.reinterpret("int16x32", tirx.Broadcast(quad, LANES))
        low = tirx.bitwise_and(w, tirx.Broadcast(tirx.IntImm("int16", 255), 32))
        # a code has 4 bits, so the arithmetic shift of w is a logical one
        return acc + low * shift(shift(x, 8, left=True), 8) + shift(w, 8) * shift(x, 8)

    def total(self, accs: Sequence[Expr], factor: int) -> Expr:
        sixteen = tirx.Broadcast(tirx.IntImm("int32", 16), LANES)
        pairs = tirx.reinterpret(I32_LANES, accs[0])
        whole = tirx.shift_right(tirx.shift_left(pairs, sixteen), sixteen) + tirx.shift_right(pairs, sixteen)
        return whole if factor == 1 else whole * tirx.Broadcast(tirx.IntImm("int32", factor), LANES)


def dot_of(isa: Isa, kind: TileKind) -> Dot:
    """The integer products of ``isa`` with weights of ``kind``. Tests put one in its place that this machine can run."""
    if isa.name == "avx512" and "avx512vnni" in isa.features:
        return Vnni()
    if isa.name == "avx512":
        return Madd(1, (12, 8, 4, 2, 1), "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")
    if isa.name == "avx2" and kind == "q8":
        return SignedMadd()
    if isa.name == "avx2":
        return Madd(2, (6, 2, 1), "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
    return Plain()


def _half(tiles: Any, tile: Expr, group: Expr, start: int) -> Expr:
    return tirx.Cast(
        F32_LANES, tirx.reinterpret("float16x16", tiles[tile, group, tirx.Ramp(start, 1, 2 * LANES)])
    )


def _code_sum(codes: Any, row: Expr, g: Expr) -> Expr:
    """int32: the sum of the 32 codes of a group of x."""
    quads = codes[row, g, tirx.Ramp(0, 1, QUADS)]

    def byte(i: int) -> Expr:
        left, right = (tirx.Broadcast(tirx.IntImm("int32", bits), QUADS) for bits in (24 - 8 * i, 24))
        return tirx.shift_right(tirx.shift_left(quads, left), right)

    return tirx.call_llvm_pure_intrin(
        "int32", "llvm.vector.reduce.add", byte(0) + byte(1) + byte(2) + byte(3)
    )


def _nibbles(word: Expr, j: Expr, lanes: int) -> Expr:
    """The low (j = 0) or high (j = 1) halves of every byte of int32 lanes."""
    shifted = tirx.shift_right(word, tirx.Broadcast(j * 4, lanes))
    return tirx.bitwise_and(shifted, tirx.Broadcast(tirx.IntImm("int32", _LOW_NIBBLES), lanes))


def _lane() -> Expr:
    return tirx.Ramp(0, 1, LANES)


def _prefetched(tiles: Any, tile: Expr, group: Expr, line: Expr) -> Expr:
    """Asks for a cache line that is read later; an address behind the end is ignored."""
    place = tirx.address_of(tiles[tile, group, line * _LINE])
    hints = [tirx.IntImm("int32", hint) for hint in (0, 3, 1)]  # to read, into all caches, data
    return tirx.call_llvm_intrin("void", "llvm.prefetch", place, *hints)


def _add(acc: Expr, sums: Expr, scale: Expr, scales: Any, row: Expr, g: Expr) -> Expr:
    """acc + scaled sums of a group."""
    return fma(scale * splat(scales[row, g, 0]), tirx.Cast(F32_LANES, sums), acc)


class _Codec:
    """How the words of an entry become quads. per_word: quads that a word is unpacked to."""

    def __init__(self, kind: TileKind, dot: Dot) -> None:
        self._q4, self._planes, self._width = kind == "q4", dot.planes[kind], dot.bytes
        self._signed = dot.signed
        self.per_word = 2 if self._planes == 2 or self._q4 else 1

    def unpacked(self, tiles: Any, tile: Expr, group: Expr, b: Expr, j: Expr, p: Expr) -> Expr:
        """Part p of quad j of word b."""
        width = self._width
        packed = tiles[tile, group, tirx.Ramp(HEADER_BYTES + b * _QUAD_BYTES + p * width, 1, width)]
        if self._signed:
            return tirx.bitwise_xor(packed, tirx.Broadcast(tirx.IntImm("uint8", 128), width))
        if self.per_word == 1:
            return packed
        word = tirx.reinterpret(f"int32x{width // 4}", packed)
        return tirx.reinterpret(f"uint8x{width}", _nibbles(word, j, width // 4))

    def quad(self, b: Expr, j: Expr) -> Expr:
        """The place in a quantised row of what meets quad j of word b."""
        return b * 2 + j if self._q4 else b

    def plane(self, j: Expr) -> Expr | int:
        return j if self._planes == 2 else 0


@functools.lru_cache(maxsize=256)
def matmul_int8_kernel(shape: MatmulShape, isa: Isa) -> tirx.PrimFunc:
    """f(codes int32 [m, columns / 32, 8], scales float32 [m, columns / 32, 2], tiles uint8, y float32 [m, rows]).

    codes and scales as ``quantise`` writes them for ``shape.kind``; m may be 0. Raises ValueError when the kind is not
    quantised, or the columns are not a multiple of 32.
    """
    kind, rows, columns = shape.kind, shape.rows, shape.columns
    if kind not in CODE_BITS or columns % GROUP:
        raise ValueError(f"no int8 product with {columns} columns of kind {kind}")
    dot = dot_of(isa, kind)
    planes, parts, width = dot.planes[kind], dot.parts, dot.bytes
    n_tiles, n_groups, entry = shape.tiles
    n_words = CODE_BITS[kind]  # of 64 bytes in an entry
    codec = _Codec(kind, dot)
    per_word, unpacked, quad, plane = codec.per_word, codec.unpacked, codec.quad, codec.plane
    chunks = chunks_of(n_tiles)
    last_rows = rows % LANES

    def ints() -> Expr:
        return tirx.Ramp(0, 1, dot.lanes)

    @T.inline
    def store(y, row, tile, source, slot):  # type: ignore[no-untyped-def]
        if last_rows != 0:
            if tile * LANES + LANES <= rows:
                y[row, T.ramp(tile * LANES, 1, LANES)] = source[slot, T.ramp(0, 1, LANES)]
            else:
                for j in T.serial(last_rows):
                    y[row, tile * LANES + j] = source[slot, j]
        else:
            y[row, T.ramp(tile * LANES, 1, LANES)] = source[slot, T.ramp(0, 1, LANES)]

    @T.inline
    def code_sums(codes, lacking, row0, count):  # type: ignore[no-untyped-def]
        """lacking[r, g]: what signed codes leave out of the sum of group g."""
        if dot.signed:
            for r in T.serial(count):
                for g in T.serial(n_groups):
                    lacking[r, g] = _code_sum(codes, row0 + r, g) * 128

    def whole(sums: Expr, lacking: Any, row: Expr | int, g: Expr) -> Expr:
        return sums + tirx.Broadcast(lacking[row, g], LANES) if dot.signed else sums

    def single_total(acc: Any) -> Expr:
        totals = [dot.total([acc[i * parts + p, ints()] for p in range(parts)], 16**i) for i in range(planes)]
        return totals[0] if planes == 1 else totals[0] + totals[1]

    @T.inline
    def single_row(codes, scales, tiles, tile, lacking, acc, total):  # type: ignore[no-untyped-def]
        """One row of x against a tile, unpacked in registers: total[0] = products, total[1] = biases."""
        total[0, T.ramp(0, 1, LANES)] = splat(0.0)
        total[1, T.ramp(0, 1, LANES)] = splat(0.0)
        for g in T.serial(n_groups):
            for i in T.unroll(planes * parts):
                acc[i, T.ramp(0, 1, dot.lanes)] = dot.zero
            for b in T.unroll(n_words):
                for j in T.unroll(per_word):
                    for p in T.unroll(parts):
                        acc[plane(j) * parts + p, T.ramp(0, 1, dot.lanes)] = dot.step(
                            acc[plane(j) * parts + p, T.ramp(0, 1, dot.lanes)],
                            unpacked(tiles, tile, g, b, j, p),
                            codes[0, g, quad(b, j)],
                        )
            total[0, T.ramp(0, 1, LANES)] = _add(
                total[0, T.ramp(0, 1, LANES)],
                whole(single_total(acc), lacking, 0, g),
                _half(tiles, tile, g, 0),
                scales,
                0,
                g,
            )
            total[1, T.ramp(0, 1, LANES)] = fma(
                _half(tiles, tile, g, HEADER_BYTES // 2),
                splat(scales[0, g, 1]),
                total[1, T.ramp(0, 1, LANES)],
            )

    @T.inline
    def unpack(tiles, tile, g, quads, factors, biases):  # type: ignore[no-untyped-def]
        factors[0, T.ramp(0, 1, LANES)] = _half(tiles, tile, g, 0)
        biases[g, T.ramp(0, 1, LANES)] = _half(tiles, tile, g, HEADER_BYTES // 2)
        for b in T.unroll(n_words):
            for j in T.unroll(per_word):
                for p in T.unroll(parts):
                    quads[plane(j) * QUADS + quad(b, j), T.ramp(p * width, 1, width)] = unpacked(
                        tiles, tile, g, b, j, p
                    )

    @T.inline
    def finish(scales, biases, sums, part, y, tile, row0, count):  # type: ignore[no-untyped-def]
        """y = sums + biases of ``count`` rows, _FINISH_ROWS at a time; the last row stands in for those behind it."""
        for b in T.serial((count + (_FINISH_ROWS - 1)) // _FINISH_ROWS):
            for r in T.unroll(_FINISH_ROWS):
                part[r, T.ramp(0, 1, LANES)] = splat(0.0)
            for g in T.serial(n_groups):
                for r in T.unroll(_FINISH_ROWS):
                    part[r, T.ramp(0, 1, LANES)] = fma(
                        biases[g, T.ramp(0, 1, LANES)],
                        splat(scales[row0 + T.min(b * _FINISH_ROWS + r, count - 1), g, 1]),
                        part[r, T.ramp(0, 1, LANES)],
                    )
            for r in T.unroll(_FINISH_ROWS):
                at: T.let[T.int64] = T.min(b * _FINISH_ROWS + r, count - 1)
                sums[_ROW_BLOCK, T.ramp(0, 1, LANES)] = (
                    sums[at, T.ramp(0, 1, LANES)] + part[r, T.ramp(0, 1, LANES)]
                )
                store(y, row0 + at, tile, sums, _ROW_BLOCK)

    def row_blocks(size: int, rest: Any) -> Any:
        """Blocks of ``size`` rows against an unpacked group, then ``rest`` (if any) for what remains."""
        more = rest is not None

        def total(acc: Any, r: Expr, i: int) -> Expr:
            return dot.total([acc[r * parts + p, ints()] for p in range(parts)], 16**i)

        @T.inline
        def accumulate(codes, quads, acc, row, group, i):  # type: ignore[no-untyped-def]
            for a in T.unroll(size * parts):
                acc[a, T.ramp(0, 1, dot.lanes)] = dot.zero
            for q in T.serial(QUADS):
                for r in T.unroll(size):
                    for p in T.unroll(parts):
                        acc[r * parts + p, T.ramp(0, 1, dot.lanes)] = dot.step(
                            acc[r * parts + p, T.ramp(0, 1, dot.lanes)],
                            quads[i * QUADS + q, T.ramp(p * width, 1, width)],
                            codes[row + r, group, q],
                        )

        @T.inline
        def run(codes, scales, quads, factors, lacking, sums, acc, low, row0, first, count, group):  # type: ignore[no-untyped-def]
            for b in T.serial(count // size):
                row: T.let[T.int64] = row0 + (first + b * size)
                accumulate(codes, quads, acc, row, group, 0)
                if planes == 2:
                    for r in T.unroll(size):
                        low[r, T.ramp(0, 1, LANES)] = total(acc, r, 0)
                    accumulate(codes, quads, acc, row, group, 1)
                for r in T.unroll(size):
                    sums[first + b * size + r, T.ramp(0, 1, LANES)] = _add(
                        sums[first + b * size + r, T.ramp(0, 1, LANES)],
                        whole(total(acc, r, 0), lacking, first + b * size + r, group)
                        if planes == 1
                        else low[r, _lane()] + total(acc, r, 1),
                        factors[0, T.ramp(0, 1, LANES)],
                        scales,
                        row + r,
                        group,
                    )
            if more:
                rest(
                    codes,
                    scales,
                    quads,
                    factors,
                    lacking,
                    sums,
                    acc,
                    low,
                    row0,
                    first + count // size * size,
                    count - count // size * size,
                    group,
                )

        return run

    all_rows = functools.reduce(lambda rest, size: row_blocks(size, rest), reversed(dot.rows), None)
    most = dot.rows[0]

    @T.prim_func(s_tir=True, private=True)
    def matmul_int8(
        codes_handle: T.handle, scales_handle: T.handle, w_handle: T.handle, y_handle: T.handle
    ) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        m = T.int64()
        codes = T.match_buffer(codes_handle, (m, n_groups, QUADS), "int32")
        scales = T.match_buffer(scales_handle, (m, n_groups, 2), "float32")
        tiles = T.match_buffer(w_handle, (n_tiles, n_groups, entry), "uint8")
        y = T.match_buffer(y_handle, (m, rows), "float32")
        if m == T.int64(1):
            for chunk in T.parallel(chunks):
                with T.sblock("row"):
                    T.reads()
                    T.writes()
                    acc = T.sblock_alloc_buffer((planes * parts, dot.lanes), dot.dtype, scope="global")
                    total = T.sblock_alloc_buffer((2, LANES), "float32", scope="global")
                    spill = T.sblock_alloc_buffer((1, LANES), "float32", scope="global")
                    lacking = T.sblock_alloc_buffer((1, n_groups), "int32", scope="global")
                    code_sums(codes, lacking, 0, 1)
                    for tile in T.serial(chunk * n_tiles // chunks, (chunk + 1) * n_tiles // chunks):
                        single_row(codes, scales, tiles, tile, lacking, acc, total)
                        # store() may index its source by a variable, which would keep total out of a register
                        spill[0, T.ramp(0, 1, LANES)] = (
                            total[0, T.ramp(0, 1, LANES)] + total[1, T.ramp(0, 1, LANES)]
                        )
                        store(y, 0, tile, spill, 0)
        else:
            for piece in T.parallel((m + (_ROW_BLOCK - 1)) // _ROW_BLOCK * chunks):
                with T.sblock("rows"):
                    T.reads()
                    T.writes()
                    quads = T.sblock_alloc_buffer((planes * QUADS, _QUAD_BYTES), "uint8", scope="global")
                    factors = T.sblock_alloc_buffer((1, LANES), "float32", scope="global")
                    biases = T.sblock_alloc_buffer((n_groups, LANES), "float32", scope="global")
                    sums = T.sblock_alloc_buffer((_ROW_BLOCK + 1, LANES), "float32", scope="global")
                    part = T.sblock_alloc_buffer((_FINISH_ROWS, LANES), "float32", scope="global")
                    acc2 = T.sblock_alloc_buffer((most * parts, dot.lanes), dot.dtype, scope="global")
                    low = T.sblock_alloc_buffer((most, LANES), "int32", scope="global")
                    lacking2 = T.sblock_alloc_buffer((_ROW_BLOCK, n_groups), "int32", scope="global")
                    chunk2: T.let[T.int32] = T.cast(piece % chunks, "int32")
                    row0: T.let[T.int64] = piece // chunks * _ROW_BLOCK
                    n_rows: T.let[T.int64] = T.min(T.int64(_ROW_BLOCK), m - row0)
                    code_sums(codes, lacking2, row0, n_rows)
                    for tile in T.serial(chunk2 * n_tiles // chunks, (chunk2 + 1) * n_tiles // chunks):
                        for r in T.serial(n_rows):
                            sums[r, T.ramp(0, 1, LANES)] = splat(0.0)
                        for g in T.serial(n_groups):
                            for line in T.unroll(entry // _LINE):
                                T.evaluate(_prefetched(tiles, tile + 1, g, line))
                            unpack(tiles, tile, g, quads, factors, biases)
                            all_rows(
                                codes,
                                scales,
                                quads,
                                factors,
                                lacking2,
                                sums,
                                acc2,
                                low,
                                row0,
                                T.int64(0),
                                n_rows,
                                g,
                            )
                        finish(scales, biases, sums, part, y, tile, row0, n_rows)

    return matmul_int8
