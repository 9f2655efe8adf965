"""The instruction set that kernels are made for: found at run time, or named by the environment.

Owns: ``Isa`` and its detection. Imports no TVM, so that an engine whose code is already compiled needs none of it.
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from microserving.errors import ConfigError

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
