"""What every CPU kernel shares: the vector expressions.

Owns: the 16-lane float32 helpers. Knows no kernel, no model and no instruction set.

Vectors are 16 lanes wide on every ISA (LLVM splits them where registers are narrower), every multiply-add is an explicit
``llvm.fma`` and every reduction has a fixed order, so that a kernel gives the same bits on every ISA. Never leave a float
multiply that feeds an add: LLVM may or may not contract it, depending on the context.

The helpers run while TVMScript is parsed and return TIR expressions. An expression used twice is copied as a tree, hence
``bind``.

Scratch has the scope "global": below 1 KiB TVM puts it on the stack, where LLVM turns it into registers. With "local" every
buffer is memory from TVM's allocator (decode of one row: a quarter slower).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from tvm import tirx
from tvm.tirx import Expr as Expr

LANES = 16
"""float32 lanes of a vector, on every ISA."""
F32_LANES = "float32x16"
I32_LANES = "int32x16"
LOG2_E = 1.4426950408889634


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c on 16 lanes, rounded once."""
    return tirx.call_llvm_pure_intrin(F32_LANES, "llvm.fma", a, b, c)


def splat(x: Expr | float) -> Expr:
    """A float32 scalar on all 16 lanes."""
    return tirx.Broadcast(tirx.FloatImm("float32", x) if isinstance(x, float) else x, LANES)


def bind(value: Expr, dtype: str, body: Callable[[Expr], Expr]) -> Expr:
    """body(value) with value computed once."""
    var = tirx.Var("v", dtype)
    return tirx.Let(var, value, body(var))


def left_fold(op: Callable[[Expr, Expr], Expr], values: Iterable[Expr]) -> Expr:
    """((v0 op v1) op v2) ...: a fixed order."""
    return functools.reduce(op, values)


# Taylor coefficients of 2**f = exp(f ln 2), highest power first: ln(2)**k / k!. Enough for |f| <= 0.5.
_EXP2_COEFFICIENTS = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


def exp2(x: Expr) -> Expr:
    """2**x on 16 lanes for x <= 0, relative error about 1e-7; exp2(0) == 1 exactly.

    x is clamped at -100, so that the result is never denormal: callers mask where an exact 0 is meant.
    """

    def polynomial(whole: Expr, fraction: Expr) -> Expr:
        p = splat(_EXP2_COEFFICIENTS[0])
        for coefficient in _EXP2_COEFFICIENTS[1:]:
            p = fma(p, fraction, splat(coefficient))
        exponent = tirx.shift_left(
            tirx.Cast(I32_LANES, whole), tirx.Broadcast(tirx.IntImm("int32", 23), LANES)
        )
        return tirx.reinterpret(F32_LANES, tirx.reinterpret(I32_LANES, p) + exponent)

    def split(clamped: Expr) -> Expr:
        nearest = tirx.call_llvm_pure_intrin(F32_LANES, "llvm.rint", clamped)
        return bind(
            nearest,
            F32_LANES,
            lambda whole: bind(clamped - whole, F32_LANES, lambda fraction: polynomial(whole, fraction)),
        )

    return bind(tirx.max(x, splat(-100.0)), F32_LANES, split)


def lane_max(vector: Expr) -> Expr:
    """The largest of 16 lanes. By shuffles: llvm.vector.reduce.fmax pays for NaN handling."""

    def halve(v: Expr, half: int) -> Expr:
        if half == 1:
            return tirx.max(tirx.Shuffle([v], [0]), tirx.Shuffle([v], [1]))
        low, high = tirx.Shuffle([v], list(range(half))), tirx.Shuffle([v], list(range(half, 2 * half)))
        return bind(tirx.max(low, high), f"float32x{half}", lambda u: halve(u, half // 2))

    return bind(vector, F32_LANES, lambda v: halve(v, LANES // 2))


def lane_sum(vector: Expr) -> Expr:
    """The sum of 16 lanes from left to right: 16 dependent additions, so call it once per row, not in a loop."""
    return tirx.call_llvm_pure_intrin(
        "float32", "llvm.vector.reduce.fadd", tirx.FloatImm("float32", 0.0), vector
    )
