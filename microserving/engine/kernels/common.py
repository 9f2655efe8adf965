"""What every CPU kernel shares: the instruction set found at run time and the vector expressions.

Owns: ``Isa`` and its detection; the 16-lane float32 helpers. Knows no kernel and no model.

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
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tvm import tirx
from tvm.tirx import Expr as Expr

from microserving.errors import ConfigError

LANES = 16
"""float32 lanes of a vector, on every ISA."""
F32_LANES = "float32x16"
I32_LANES = "int32x16"
LOG2_E = 1.4426950408889634

IsaName = Literal["avx512", "avx2", "generic"]
ISA_VARIABLE = "MICROSERVING_ISA"
"""Environment variable that overrides the detection (tests, and comparing kernels on one machine)."""


@dataclass(frozen=True, slots=True)
class Isa:
    """What kernel generators may depend on. It changes register blocking, never the order of a computation.

    accumulators: 16-lane float32 accumulators that stay in registers beside the operands of an FMA.
    converts_half: float16 <-> float32 is an instruction; without it only float32 KV is offered.
    """

    name: IsaName
    mcpu: str | None
    features: tuple[str, ...]
    accumulators: int
    converts_half: bool

    @property
    def target(self) -> dict[str, object]:
        """The argument of ``tvm.target.Target``."""
        target: dict[str, object] = {"kind": "llvm"}
        if self.mcpu is not None:
            target["mcpu"] = self.mcpu
        if self.features:
            target["mattr"] = [f"+{feature}" for feature in self.features]
        return target

    def check_kv_dtype(self, dtype: str) -> None:
        """Raises ConfigError when the kernels cannot offer K/V pages of this dtype on this ISA."""
        if dtype == "float16" and not self.converts_half:
            raise ConfigError(
                f"float16 K/V needs half conversion, which ISA {self.name} lacks: use float32",
                param="kv_dtype",
            )


_AVX512_FLAGS = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_AVX2_FLAGS = frozenset({"avx2", "fma", "f16c", "bmi2"})


def make_isa(name: IsaName, flags: frozenset[str] = frozenset()) -> Isa:
    """The ISA ``name``; flags (words of /proc/cpuinfo) add optional instructions such as VNNI."""
    if name == "avx512":
        return Isa(name, "x86-64-v4", ("avx512vnni",) if "avx512_vnni" in flags else (), 24, True)
    if name == "avx2":
        return Isa(name, "x86-64-v3", (), 6, True)
    arm = platform.machine() in (
        "aarch64",
        "arm64",
    )  # 32 registers of 4 lanes, and half conversion in the base set
    return Isa(name, None, (), 6 if arm else 2, arm)


def detect_isa() -> Isa:
    """The best ISA of this machine, or the one that the environment variable MICROSERVING_ISA names.

    Raises ConfigError when the variable names no known ISA.
    """
    flags = _cpu_flags()
    name = os.environ.get(ISA_VARIABLE, "")
    if not name:
        return make_isa(_best_isa(flags), flags)
    for known in get_args(IsaName):
        if name == known:
            return make_isa(known, flags)
    raise ConfigError(
        f"{ISA_VARIABLE}={name!r}: must be one of {', '.join(get_args(IsaName))}", param=ISA_VARIABLE
    )


def _best_isa(flags: frozenset[str]) -> IsaName:
    if not flags >= _AVX2_FLAGS:
        return "generic"
    return "avx512" if flags >= _AVX512_FLAGS else "avx2"


@functools.cache
def _cpu_flags() -> frozenset[str]:
    """The flags of the first CPU: what the kernel (and a hypervisor) lets programs use. Empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset()
    )


# ---- expressions -----------------------------------------------------------------------------------------------------


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
