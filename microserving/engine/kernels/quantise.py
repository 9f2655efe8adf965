# mypy: disable-error-code="untyped-decorator"
"""Rows of float32 as 8-bit codes with a scale per group of 32 columns (llama.cpp's Q8_1): the input of ``matmul_int8``.

Owns: the rounding, the byte order of codes, and the kernels that write them (plain, after RMSNorm, after the SiLU gate).
Does not know weights or models; which columns make a quad depends on the kind of the weight that reads the row.

A group with largest magnitude M: scale = M / 127, code = x * (127 / M) to the nearest integer (ties to even). A group below
2**-100 counts as zeros: 127 / M must not overflow. A row's codes depend on that row only.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

from microserving.engine.kernels.common import F32_LANES, I32_LANES, LANES, Expr, lane_max, splat
from microserving.engine.kernels.elementwise import SERIAL_ROWS, normalise_row, sigmoid
from microserving.engine.kernels.matmul_int8 import QUADS, column_order
from microserving.engine.kernels.tiles import GROUP, TileKind

_LARGEST_CODE = 127.0
_SMALLEST = 2.0**-100
_ROUND = 1.5 * 2.0**23  # x + _ROUND has the nearest integer to x in its low bits, for |x| < 2**22
_ROUND_BITS = 0x4B400000


def _codes(x: Expr, inverse: Expr) -> Expr:
    """int32x16: x * inverse to the nearest integer, rounded once, and without an instruction that SSE2 lacks."""
    scaled = tirx.call_llvm_pure_intrin(F32_LANES, "llvm.fma", x, splat(inverse), splat(_ROUND))
    return tirx.reinterpret(I32_LANES, scaled) - tirx.Broadcast(tirx.IntImm("int32", _ROUND_BITS), LANES)


def _magnitude(low: Expr, high: Expr) -> Expr:
    def absolute(v: Expr) -> Expr:
        return tirx.call_llvm_pure_intrin(F32_LANES, "llvm.fabs", v)

    return lane_max(tirx.max(absolute(low), absolute(high)))


def _packed(codes: Any, order: list[int]) -> Expr:
    """int32x8 of 32 codes in ``order``: lane q holds quad q."""
    vectors = [tirx.Cast("int8x16", codes[tirx.Ramp(at, 1, LANES)]) for at in (0, LANES)]
    return tirx.reinterpret(f"int32x{QUADS}", tirx.Shuffle(vectors, order))


def _sum(codes: Any) -> Expr:
    both = codes[tirx.Ramp(0, 1, LANES)] + codes[tirx.Ramp(LANES, 1, LANES)]
    return tirx.Cast("float32", tirx.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add", both))


def _quantise_group(kind: TileKind) -> Any:
    """Inline: codes[row, g] and scales[row, g] from the 32 numbers x[i, at:at + 32]; ints: int32 [32], scratch."""
    order = column_order(kind)

    @T.inline
    def run(x, i, at, ints, codes, scales, row, g):  # type: ignore[no-untyped-def]
        largest: T.let[T.float32] = _magnitude(x[i, T.ramp(at, 1, LANES)], x[i, T.ramp(at + LANES, 1, LANES)])
        inverse: T.let[T.float32] = T.Select(
            largest >= T.float32(_SMALLEST), T.float32(_LARGEST_CODE) / largest, T.float32(0.0)
        )
        for c in T.unroll(2):
            ints[T.ramp(c * LANES, 1, LANES)] = _codes(x[i, T.ramp(at + c * LANES, 1, LANES)], inverse)
        codes[row, g, T.ramp(0, 1, QUADS)] = _packed(ints, order)
        scale: T.let[T.float32] = largest * T.float32(1.0 / _LARGEST_CODE)
        scales[row, g, 0] = scale
        scales[row, g, 1] = scale * _sum(ints)

    return run


@functools.lru_cache(maxsize=64)
def quantise_kernel(size: int, kind: TileKind) -> tirx.PrimFunc:
    """f(x float32 [n, size], codes int32 [n, size / 32, 8], scales float32 [n, size / 32, 2]) for weights of ``kind``.

    scales: the scale, then the scale times the sum of the codes. Lane q of codes is the quad that ``column_order`` names.
    """
    groups, quantise = _groups(size), _quantise_group(kind)

    @T.inline
    def row(x, ints, codes, scales, i):  # type: ignore[no-untyped-def]
        for g in T.serial(groups):
            quantise(x, i, g * GROUP, ints, codes, scales, i, g)

    @T.prim_func(s_tir=True, private=True)
    def quantise_rows(x_handle: T.handle, codes_handle: T.handle, scales_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, size), "float32")
        codes = T.match_buffer(codes_handle, (n, groups, QUADS), "int32")
        scales = T.match_buffer(scales_handle, (n, groups, 2), "float32")
        if n <= T.int64(SERIAL_ROWS):
            with T.sblock("serial"):
                T.reads()
                T.writes()
                ints = T.sblock_alloc_buffer((GROUP,), "int32", scope="global")
                for i in T.serial(n):
                    row(x, ints, codes, scales, i)
        else:
            for i in T.parallel(n):
                with T.sblock("parallel"):
                    T.reads()
                    T.writes()
                    ints2 = T.sblock_alloc_buffer((GROUP,), "int32", scope="global")
                    row(x, ints2, codes, scales, i)

    return quantise_rows


@functools.lru_cache(maxsize=64)
def add_norm_quantise_kernel(size: int, eps: float, kind: TileKind) -> tirx.PrimFunc:
    """f(x [n, size], delta [n, size], weight [size], codes, scales): x += delta; codes, scales = quantised norm(x)."""
    groups, quantise, normalise = _groups(size), _quantise_group(kind), normalise_row(size, eps)

    @T.inline
    def row(x, delta, weight, normed, lanes, ints, codes, scales, i):  # type: ignore[no-untyped-def]
        for c in T.serial(size // LANES):
            x[i, T.ramp(c * LANES, 1, LANES)] = (
                x[i, T.ramp(c * LANES, 1, LANES)] + delta[i, T.ramp(c * LANES, 1, LANES)]
            )
        normalise(x, i, weight, normed, 0, lanes)
        for g in T.serial(groups):
            quantise(normed, 0, g * GROUP, ints, codes, scales, i, g)

    @T.prim_func(s_tir=True, private=True)
    def add_norm_quantise(
        x_handle: T.handle,
        delta_handle: T.handle,
        w_handle: T.handle,
        codes_handle: T.handle,
        scales_handle: T.handle,
    ) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, size), "float32")
        delta = T.match_buffer(delta_handle, (n, size), "float32")
        weight = T.match_buffer(w_handle, (size,), "float32")
        codes = T.match_buffer(codes_handle, (n, groups, QUADS), "int32")
        scales = T.match_buffer(scales_handle, (n, groups, 2), "float32")
        if n <= T.int64(SERIAL_ROWS):
            with T.sblock("serial"):
                T.reads()
                T.writes()
                normed = T.sblock_alloc_buffer((1, size), "float32", scope="global")
                lanes = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
                ints = T.sblock_alloc_buffer((GROUP,), "int32", scope="global")
                for i in T.serial(n):
                    row(x, delta, weight, normed, lanes, ints, codes, scales, i)
        else:
            for i in T.parallel(n):
                with T.sblock("parallel"):
                    T.reads()
                    T.writes()
                    normed2 = T.sblock_alloc_buffer((1, size), "float32", scope="global")
                    lanes2 = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
                    ints2 = T.sblock_alloc_buffer((GROUP,), "int32", scope="global")
                    row(x, delta, weight, normed2, lanes2, ints2, codes, scales, i)

    return add_norm_quantise


@functools.lru_cache(maxsize=64)
def silu_mul_quantise_kernel(size: int, kind: TileKind) -> tirx.PrimFunc:
    """f(gate_up float32 [n, 2 * size], codes, scales): quantised silu(gate) * up."""
    groups, quantise = _groups(size), _quantise_group(kind)

    @T.inline
    def row(x, gated, ints, codes, scales, i):  # type: ignore[no-untyped-def]
        for g in T.serial(groups):
            for c in T.unroll(GROUP // LANES):
                gated[0, T.ramp(c * LANES, 1, LANES)] = (
                    x[i, T.ramp(g * GROUP + c * LANES, 1, LANES)]
                    * sigmoid(x[i, T.ramp(g * GROUP + c * LANES, 1, LANES)])
                    * x[i, T.ramp(size + g * GROUP + c * LANES, 1, LANES)]
                )
            quantise(gated, 0, 0, ints, codes, scales, i, g)

    @T.prim_func(s_tir=True, private=True)
    def silu_mul_quantise(x_handle: T.handle, codes_handle: T.handle, scales_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, 2 * size), "float32")
        codes = T.match_buffer(codes_handle, (n, groups, QUADS), "int32")
        scales = T.match_buffer(scales_handle, (n, groups, 2), "float32")
        if n <= T.int64(SERIAL_ROWS):
            with T.sblock("serial"):
                T.reads()
                T.writes()
                gated = T.sblock_alloc_buffer((1, GROUP), "float32", scope="global")
                ints = T.sblock_alloc_buffer((GROUP,), "int32", scope="global")
                for i in T.serial(n):
                    row(x, gated, ints, codes, scales, i)
        else:
            for i in T.parallel(n):
                with T.sblock("parallel"):
                    T.reads()
                    T.writes()
                    gated2 = T.sblock_alloc_buffer((1, GROUP), "float32", scope="global")
                    ints2 = T.sblock_alloc_buffer((GROUP,), "int32", scope="global")
                    row(x, gated2, ints2, codes, scales, i)

    return silu_mul_quantise


def _groups(size: int) -> int:
    if size % GROUP:
        raise ValueError(f"{size} columns are not a multiple of {GROUP}")
    return size // GROUP
