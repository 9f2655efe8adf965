# mypy: disable-error-code="untyped-decorator"
"""What some architectures do to q, k and v between their projection and the rotary embedding: a bias, a norm per head.

Owns: kernels that change the rows of a projection in place. Every row is computed by the same code in a fixed order, as in
``elementwise``. Knows no model.
"""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

from microserving.engine.kernels.common import LANES, Expr, fma, lane_sum, splat
from microserving.engine.kernels.elementwise import SERIAL_ROWS


@functools.lru_cache(maxsize=64)
def bias_kernel(size: int) -> tirx.PrimFunc:
    """f(x [n, size], bias [size]), float32: x += bias; size is a multiple of 16."""

    @T.inline
    def row(x, bias, i):  # type: ignore[no-untyped-def]
        for c in T.serial(size // LANES):
            x[i, T.ramp(c * LANES, 1, LANES)] = (
                x[i, T.ramp(c * LANES, 1, LANES)] + bias[T.ramp(c * LANES, 1, LANES)]
            )

    @T.prim_func(s_tir=True, private=True)
    def add_bias(x_handle: T.handle, bias_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, size), "float32")
        bias = T.match_buffer(bias_handle, (size,), "float32")
        if n <= T.int64(SERIAL_ROWS):
            with T.sblock("serial"):
                T.reads()
                T.writes()
                for i in T.serial(n):
                    row(x, bias, i)
        else:
            for i in T.parallel(n):
                with T.sblock("parallel"):
                    T.reads()
                    T.writes()
                    row(x, bias, i)

    return add_bias


@functools.lru_cache(maxsize=64)
def head_norm_kernel(heads: int, kv_heads: int, head_dim: int, eps: float) -> tirx.PrimFunc:
    """f(x [n, (heads + 2 * kv_heads) * head_dim], q_weight [head_dim], k_weight [head_dim]), float32.

    RMSNorm of every head of q and of k in place; v stays. head_dim is a multiple of 16.
    """
    width = (heads + 2 * kv_heads) * head_dim

    def scalar(intrinsic: str, *arguments: Expr) -> Expr:
        return tirx.call_llvm_pure_intrin("float32", intrinsic, *arguments)

    @T.inline
    def normalise(x, weight, i, start, lanes):  # type: ignore[no-untyped-def]
        lanes[T.ramp(0, 1, LANES)] = splat(0.0)
        for c in T.serial(head_dim // LANES):
            lanes[T.ramp(0, 1, LANES)] = fma(
                x[i, T.ramp(start + c * LANES, 1, LANES)],
                x[i, T.ramp(start + c * LANES, 1, LANES)],
                lanes[T.ramp(0, 1, LANES)],
            )
        mean: T.let[T.float32] = scalar(
            "llvm.fma", lane_sum(lanes[T.ramp(0, 1, LANES)]), T.float32(1.0 / head_dim), T.float32(eps)
        )
        scale: T.let[T.float32] = T.float32(1.0) / scalar("llvm.sqrt", mean)
        for c in T.serial(head_dim // LANES):
            x[i, T.ramp(start + c * LANES, 1, LANES)] = (
                x[i, T.ramp(start + c * LANES, 1, LANES)] * splat(scale) * weight[T.ramp(c * LANES, 1, LANES)]
            )

    @T.inline
    def row(x, q_weight, k_weight, i, lanes):  # type: ignore[no-untyped-def]
        for h in T.serial(heads):
            normalise(x, q_weight, i, h * head_dim, lanes)
        for h in T.serial(kv_heads):
            normalise(x, k_weight, i, (heads + h) * head_dim, lanes)

    @T.prim_func(s_tir=True, private=True)
    def head_norm(x_handle: T.handle, q_handle: T.handle, k_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, width), "float32")
        q_weight = T.match_buffer(q_handle, (head_dim,), "float32")
        k_weight = T.match_buffer(k_handle, (head_dim,), "float32")
        if n <= T.int64(SERIAL_ROWS):
            with T.sblock("serial"):
                T.reads()
                T.writes()
                lanes = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
                for i in T.serial(n):
                    row(x, q_weight, k_weight, i, lanes)
        else:
            for i in T.parallel(n):
                with T.sblock("parallel"):
                    T.reads()
                    T.writes()
                    lanes2 = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
                    row(x, q_weight, k_weight, i, lanes2)

    return head_norm
