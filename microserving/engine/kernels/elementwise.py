# mypy: disable-error-code="untyped-decorator"
"""The kernels of a decoder layer that are neither a matrix product nor attention.

Owns: embedding gather, RMSNorm (with the residual add, and of chosen rows), rotary embedding, SiLU gate. Every row is
computed by the same code in a fixed order, so batch mates and threads do not matter. Knows no model.

Few rows run on the calling thread: starting the others costs more than the work.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

from microserving.engine.kernels.common import F32_LANES, LANES, LOG2_E, Expr, exp2, fma, lane_sum, splat
from microserving.engine.kernels.tiles import CODE_BITS, GROUP, HEADER_BYTES, TILE_ROWS, MatmulShape

SERIAL_ROWS = 16
"""Up to so many rows are not worth waking another thread for."""


def _abs(x: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin(F32_LANES, "llvm.fabs", x)


def _sqrt(x: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin("float32", "llvm.sqrt", x)


def _scalar_fma(a: Expr, b: Expr, c: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin("float32", "llvm.fma", a, b, c)


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x)) from e = exp(-|x|), which cannot overflow."""
    e = exp2(tirx.Mul(_abs(x), splat(-LOG2_E)))
    v = tirx.Var("e", F32_LANES)
    return tirx.Let(v, e, tirx.Select(x >= splat(0.0), splat(1.0), v) / (v + splat(1.0)))


def _half(tiles: Any, tile: Expr, group: Expr, start: Expr) -> Expr:
    """One float16 of a tile entry, at byte ``start``, as float32."""
    return tirx.Cast("float32", tirx.reinterpret("float16", tiles[tile, group, tirx.Ramp(start, 1, 2)]))


def _element(shape: MatmulShape, tiles: Any, row: Expr, k: Expr) -> Expr:
    """w[row, k] of packed tiles, with the same rounding as in the matmul."""
    tile, lane, group, column = row // TILE_ROWS, row % TILE_ROWS, k // GROUP, k % GROUP
    place = column * TILE_ROWS + lane
    if shape.kind == "f16":
        return _half(tiles, tile, group, place * 2)
    if shape.kind == "bf16":
        half = tirx.reinterpret("uint16", tiles[tile, group, tirx.Ramp(place * 2, 1, 2)])
        return tirx.reinterpret(
            "float32", tirx.shift_left(tirx.Cast("uint32", half), tirx.IntImm("uint32", 16))
        )
    if shape.kind == "f32":
        return tirx.reinterpret("float32", tiles[tile, group, tirx.Ramp(place * 4, 1, 4)])
    bits = CODE_BITS[shape.kind]
    start = HEADER_BYTES + (column // (32 // bits) * TILE_ROWS + lane) * 4
    word = tirx.reinterpret("int32", tiles[tile, group, tirx.Ramp(start, 1, 4)])
    shifted = tirx.shift_right(word, column % (32 // bits) * bits)
    code = tirx.bitwise_and(shifted, tirx.IntImm("int32", 2**bits - 1))
    return _scalar_fma(
        _half(tiles, tile, group, lane * 2),
        tirx.Cast("float32", code),
        _half(tiles, tile, group, 32 + lane * 2),
    )


@functools.lru_cache(maxsize=64)
def embedding_kernel(shape: MatmulShape) -> tirx.PrimFunc:
    """f(ids int32 [n], tiles uint8, out float32 [n, columns]): the rows ``ids`` of a packed weight.

    An id outside [0, rows) reads the nearest row: callers check ids.
    """
    columns = shape.columns

    @T.inline
    def gather(ids, tiles, out, i):  # type: ignore[no-untyped-def]
        row: T.let[T.int32] = T.max(0, T.min(ids[i], shape.rows - 1))
        for k in T.serial(columns):
            out[i, k] = _element(shape, tiles, row, k)

    @T.prim_func(s_tir=True, private=True)
    def embedding(ids_handle: T.handle, w_handle: T.handle, out_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        ids = T.match_buffer(ids_handle, (n,), "int32")
        tiles = T.match_buffer(w_handle, shape.tiles, "uint8")
        out = T.match_buffer(out_handle, (n, columns), "float32")
        if n <= T.int64(SERIAL_ROWS):
            with T.sblock("serial"):
                T.reads()
                T.writes()
                for i in T.serial(n):
                    gather(ids, tiles, out, i)
        else:
            for i in T.parallel(n):
                with T.sblock("parallel"):
                    T.reads()
                    T.writes()
                    gather(ids, tiles, out, i)

    return embedding


def normalise_row(size: int, eps: float) -> Any:
    """Inline: out[o] = x[i] / sqrt(mean(x[i] ** 2) + eps) * weight; 16 lane sums, added from left to right."""

    @T.inline
    def run(x, i, weight, out, o, lanes):  # type: ignore[no-untyped-def]
        lanes[T.ramp(0, 1, LANES)] = splat(0.0)
        for c in T.serial(size // LANES):
            lanes[T.ramp(0, 1, LANES)] = fma(
                x[i, T.ramp(c * LANES, 1, LANES)],
                x[i, T.ramp(c * LANES, 1, LANES)],
                lanes[T.ramp(0, 1, LANES)],
            )
        mean: T.let[T.float32] = _scalar_fma(
            lane_sum(lanes[T.ramp(0, 1, LANES)]), T.float32(1.0 / size), T.float32(eps)
        )
        scale: T.let[T.float32] = T.float32(1.0) / _sqrt(mean)
        for c in T.serial(size // LANES):
            out[o, T.ramp(c * LANES, 1, LANES)] = (
                x[i, T.ramp(c * LANES, 1, LANES)] * splat(scale) * weight[T.ramp(c * LANES, 1, LANES)]
            )

    return run


@functools.lru_cache(maxsize=64)
def rms_norm_kernel(size: int, eps: float) -> tirx.PrimFunc:
    """f(x float32 [n, size], weight float32 [size], out float32 [n, size]); size is a multiple of 16."""
    normalise = normalise_row(size, eps)

    @T.prim_func(s_tir=True, private=True)
    def rms_norm(x_handle: T.handle, w_handle: T.handle, out_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, size), "float32")
        weight = T.match_buffer(w_handle, (size,), "float32")
        out = T.match_buffer(out_handle, (n, size), "float32")
        if n <= T.int64(SERIAL_ROWS):
            with T.sblock("serial"):
                T.reads()
                T.writes()
                lanes = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
                for i in T.serial(n):
                    normalise(x, i, weight, out, i, lanes)
        else:
            for i in T.parallel(n):
                with T.sblock("parallel"):
                    T.reads()
                    T.writes()
                    lanes2 = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
                    normalise(x, i, weight, out, i, lanes2)

    return rms_norm


@functools.lru_cache(maxsize=64)
def add_rms_norm_kernel(size: int, eps: float) -> tirx.PrimFunc:
    """f(x [n, size], delta [n, size], weight [size], out [n, size]), all float32: x += delta; out = norm(x)."""
    normalise = normalise_row(size, eps)

    @T.inline
    def row(x, delta, weight, out, i, lanes):  # type: ignore[no-untyped-def]
        for c in T.serial(size // LANES):
            x[i, T.ramp(c * LANES, 1, LANES)] = (
                x[i, T.ramp(c * LANES, 1, LANES)] + delta[i, T.ramp(c * LANES, 1, LANES)]
            )
        normalise(x, i, weight, out, i, lanes)

    @T.prim_func(s_tir=True, private=True)
    def add_rms_norm(
        x_handle: T.handle, delta_handle: T.handle, w_handle: T.handle, out_handle: T.handle
    ) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, size), "float32")
        delta = T.match_buffer(delta_handle, (n, size), "float32")
        weight = T.match_buffer(w_handle, (size,), "float32")
        out = T.match_buffer(out_handle, (n, size), "float32")
        if n <= T.int64(SERIAL_ROWS):
            with T.sblock("serial"):
                T.reads()
                T.writes()
                lanes = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
                for i in T.serial(n):
                    row(x, delta, weight, out, i, lanes)
        else:
            for i in T.parallel(n):
                with T.sblock("parallel"):
                    T.reads()
                    T.writes()
                    lanes2 = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
                    row(x, delta, weight, out, i, lanes2)

    return add_rms_norm


@functools.lru_cache(maxsize=64)
def last_norm_kernel(size: int, eps: float) -> tirx.PrimFunc:
    """f(x [n, size], delta [n, size], rows int32 [r], weight [size], out [r, size]): norm(x + delta) of some rows.

    x is changed in those rows; rows are distinct; r may be 0.
    """
    normalise = normalise_row(size, eps)

    @T.prim_func(s_tir=True, private=True)
    def last_norm(
        x_handle: T.handle,
        delta_handle: T.handle,
        rows_handle: T.handle,
        w_handle: T.handle,
        out_handle: T.handle,
    ) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        r = T.int64()
        x = T.match_buffer(x_handle, (n, size), "float32")
        delta = T.match_buffer(delta_handle, (n, size), "float32")
        rows = T.match_buffer(rows_handle, (r,), "int32")
        weight = T.match_buffer(w_handle, (size,), "float32")
        out = T.match_buffer(out_handle, (r, size), "float32")
        with T.sblock("rows"):
            T.reads()
            T.writes()
            lanes = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
            for o in T.serial(r):
                for c in T.serial(size // LANES):
                    x[rows[o], T.ramp(c * LANES, 1, LANES)] = (
                        x[rows[o], T.ramp(c * LANES, 1, LANES)] + delta[rows[o], T.ramp(c * LANES, 1, LANES)]
                    )
                normalise(x, rows[o], weight, out, o, lanes)

    return last_norm


@functools.lru_cache(maxsize=64)
def silu_mul_kernel(size: int) -> tirx.PrimFunc:
    """f(gate_up [n, 2 * size], out [n, size]), float32: silu(gate) * up; size is a multiple of 16."""

    @T.inline
    def row(x, out, i):  # type: ignore[no-untyped-def]
        for c in T.serial(size // LANES):
            out[i, T.ramp(c * LANES, 1, LANES)] = (
                x[i, T.ramp(c * LANES, 1, LANES)]
                * sigmoid(x[i, T.ramp(c * LANES, 1, LANES)])
                * x[i, T.ramp(size + c * LANES, 1, LANES)]
            )

    @T.prim_func(s_tir=True, private=True)
    def silu_mul(x_handle: T.handle, out_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, 2 * size), "float32")
        out = T.match_buffer(out_handle, (n, size), "float32")
        if n <= T.int64(SERIAL_ROWS):
            with T.sblock("serial"):
                T.reads()
                T.writes()
                for i in T.serial(n):
                    row(x, out, i)
        else:
            for i in T.parallel(n):
                with T.sblock("parallel"):
                    T.reads()
                    T.writes()
                    row(x, out, i)

    return silu_mul


@functools.lru_cache(maxsize=64)
def rope_kernel(heads: int, kv_heads: int, head_dim: int) -> tirx.PrimFunc:
    """f(qkv [n, (heads + 2 * kv_heads) * head_dim], angles [n, head_dim], q, k, v), float32: split, and rotate q and k.

    q: [n, heads, head_dim]; k, v: [n, kv_heads, head_dim].
    angles: cosines, then sines, of head_dim / 2 frequencies. NeoX order: element i pairs with i + head_dim / 2.
    """
    half = head_dim // 2
    lanes = math.gcd(half, LANES)
    vector = f"float32x{lanes}" if lanes > 1 else "float32"

    def multiply_add(a: Expr, b: Expr, c: Expr) -> Expr:
        return tirx.call_llvm_pure_intrin(vector, "llvm.fma", a, b, c)

    def minus_one() -> Expr:
        one = tirx.FloatImm("float32", -1.0)
        return tirx.Broadcast(one, lanes) if lanes > 1 else one

    def part(start: Expr) -> Expr:
        return tirx.Ramp(start, 1, lanes) if lanes > 1 else start

    @T.inline
    def rotate(x, angles, i, start, out, head):  # type: ignore[no-untyped-def]
        for c in T.serial(half // lanes):
            out[i, head, part(c * lanes)] = multiply_add(
                x[i, part(start + half + c * lanes)] * minus_one(),
                angles[i, part(half + c * lanes)],
                x[i, part(start + c * lanes)] * angles[i, part(c * lanes)],
            )
            out[i, head, part(half + c * lanes)] = multiply_add(
                x[i, part(start + c * lanes)],
                angles[i, part(half + c * lanes)],
                x[i, part(start + half + c * lanes)] * angles[i, part(c * lanes)],
            )

    @T.inline
    def row(x, angles, q, k, v, i):  # type: ignore[no-untyped-def]
        for h in T.serial(heads):
            rotate(x, angles, i, h * head_dim, q, h)
        for h in T.serial(kv_heads):
            rotate(x, angles, i, (heads + h) * head_dim, k, h)
            for c in T.serial(head_dim // lanes):
                v[i, h, part(c * lanes)] = x[i, part((heads + kv_heads + h) * head_dim + c * lanes)]

    @T.prim_func(s_tir=True, private=True)
    def rope(
        x_handle: T.handle,
        angles_handle: T.handle,
        q_handle: T.handle,
        k_handle: T.handle,
        v_handle: T.handle,
    ) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, (heads + 2 * kv_heads) * head_dim), "float32")
        angles = T.match_buffer(angles_handle, (n, head_dim), "float32")
        q = T.match_buffer(q_handle, (n, heads, head_dim), "float32")
        k = T.match_buffer(k_handle, (n, kv_heads, head_dim), "float32")
        v = T.match_buffer(v_handle, (n, kv_heads, head_dim), "float32")
        if n <= T.int64(SERIAL_ROWS):
            with T.sblock("serial"):
                T.reads()
                T.writes()
                for i in T.serial(n):
                    row(x, angles, q, k, v, i)
        else:
            for i in T.parallel(n):
                with T.sblock("parallel"):
                    T.reads()
                    T.writes()
                    row(x, angles, q, k, v, i)

    return rope
