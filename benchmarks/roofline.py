"""What this machine can do at best: memory bandwidth and multiply-adds per second, measured; and what a step needs of them.

Owns: the two limits and the counts of bytes and multiply-adds. Does not know how anything is computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tvm
from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

from microserving.engine.kernels.common import LANES, fma, splat
from microserving.engine.kernels.isa import Isa, detect_isa
from microserving.engine.model_runner import set_tvm_threads
from microserving.model_files import WeightSource

Arithmetic = Literal["float32", "int8"]
_BUFFER = 1 << 25  # float32 numbers: 128 MB, more than any cache here
_ROUNDS = 1 << 17  # a fraction of a millisecond: less than a time slice
_REPEATS = 25
_INT8_CHAINS = 12


@dataclass(frozen=True)
class Machine:
    """bandwidth: bytes per second that all threads read together. peaks: multiply-adds per second of one core times the
    threads; int8 is absent where there is no instruction for it."""

    bandwidth: float
    peaks: dict[Arithmetic, float]


@dataclass(frozen=True)
class Need:
    """What one step must read and compute, however it is done."""

    nbytes: float
    multiply_adds: float

    def seconds(self, machine: Machine, arithmetic: Arithmetic) -> float:
        """The least time: nothing overlaps better than completely."""
        return max(self.nbytes / machine.bandwidth, self.multiply_adds / machine.peaks[arithmetic])


def measure_machine(threads: int) -> Machine:
    """About a second. Call on the thread that runs the model, after its runner has set the number of threads."""
    set_tvm_threads(threads)
    isa = detect_isa()
    numbers = tvm.runtime.tensor(np.ones((threads, _BUFFER // threads), np.float32))
    sums = tvm.runtime.tensor(np.zeros((threads, LANES), np.float32))
    seconds = _best(_compiled(_read_kernel(threads, _BUFFER // threads), isa), numbers, sums)
    one_core: dict[Arithmetic, float] = {}
    floats = tvm.runtime.tensor(np.zeros((1, LANES), np.float32))
    one_core["float32"] = _ROUNDS * isa.accumulators * LANES / _best(_compiled(_fma_kernel(isa), isa), floats)
    if isa.name == "avx2" or "avx512vnni" in isa.features:
        integers = tvm.runtime.tensor(np.zeros((1, LANES), np.int32))
        products = _ROUNDS * _INT8_CHAINS * 4 * _int8_lanes(isa)
        one_core["int8"] = products / _best(_compiled(_int8_kernel(isa), isa), integers)
    return Machine(4 * _BUFFER / seconds, {kind: threads * peak for kind, peak in one_core.items()})


def step_need(
    source: WeightSource,
    *,
    rows: int,
    context: float,
    logit_rows: int,
    sequences: int = 1,
    dense: bool = False,
) -> Need:
    """``rows`` tokens that each attend to ``context`` tokens on average; K/V is float16.

    sequences: how many separate contexts of that length are read (a prefill reads its own once). dense: weights as float32.
    """
    config = source.config
    body, head, nbytes = 0, config.vocab_size * config.hidden_size, 0
    for name in source.names():
        weight = source.weight(name)
        count = int(np.prod(weight.shape))
        looked_up = name == "model.embed_tokens.weight" and not config.tie_word_embeddings
        if len(weight.shape) == 2 and not looked_up:
            nbytes += 4 * count if dense else weight.rows.size
            body += count
    body -= head
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * context
    kv = 4 * config.num_layers * config.num_kv_heads * config.head_dim * context * sequences
    return Need(nbytes + kv, rows * (body + attention) + logit_rows * head)


def _compiled(kernel: tirx.PrimFunc, isa: Isa) -> Any:
    return tvm.compile(tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")}), target=isa.target)[
        "main"
    ]


def _best(kernel: Any, *arguments: Any) -> float:
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        kernel(*arguments)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _read_kernel(threads: int, count: int) -> tirx.PrimFunc:
    chains = 4

    @T.prim_func(s_tir=True)
    def read(
        numbers: T.Buffer((threads, count), "float32"), out: T.Buffer((threads, LANES), "float32")
    ) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        for t in T.parallel(threads):
            with T.sblock("thread"):
                T.reads()
                T.writes()
                acc = T.sblock_alloc_buffer((chains, LANES), "float32", scope="local")
                for c in T.unroll(chains):
                    acc[c, T.ramp(0, 1, LANES)] = splat(0.0)
                for i in T.serial(count // (chains * LANES)):
                    for c in T.unroll(chains):
                        acc[c, T.ramp(0, 1, LANES)] = (
                            acc[c, T.ramp(0, 1, LANES)]
                            + numbers[t, T.ramp((i * chains + c) * LANES, 1, LANES)]
                        )
                for c in T.unroll(chains):
                    out[t, T.ramp(0, 1, LANES)] = out[t, T.ramp(0, 1, LANES)] + acc[c, T.ramp(0, 1, LANES)]

    return read


def _fma_kernel(isa: Isa) -> tirx.PrimFunc:
    chains = isa.accumulators

    @T.prim_func(s_tir=True)
    def multiply_add(out: T.Buffer((1, LANES), "float32")) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        with T.sblock("thread"):
            T.reads()
            T.writes()
            acc = T.sblock_alloc_buffer((chains, LANES), "float32", scope="local")
            one = T.sblock_alloc_buffer((1, LANES), "float32", scope="local")
            one[0, T.ramp(0, 1, LANES)] = out[0, T.ramp(0, 1, LANES)]
            for c in T.unroll(chains):
                acc[c, T.ramp(0, 1, LANES)] = splat(0.0)
            for _ in T.serial(_ROUNDS):
                for c in T.unroll(chains):
                    acc[c, T.ramp(0, 1, LANES)] = fma(
                        acc[c, T.ramp(0, 1, LANES)], one[0, T.ramp(0, 1, LANES)], one[0, T.ramp(0, 1, LANES)]
                    )
            for c in T.unroll(chains):
                out[0, T.ramp(0, 1, LANES)] = out[0, T.ramp(0, 1, LANES)] + acc[c, T.ramp(0, 1, LANES)]

    return multiply_add


def _int8_lanes(isa: Isa) -> int:
    return LANES if isa.name == "avx512" else LANES // 2


def _int8_step(isa: Isa, acc: Any, a: Any, b: Any) -> Any:
    """acc int32 [n] += 4 products of a uint8 and b int8 per lane, as the matmuls of this ISA must do it."""
    if isa.name == "avx512":
        return tirx.call_llvm_pure_intrin("int32x16", "llvm.x86.avx512.vpdpbusd.512", acc, a, b)
    ones = tirx.Broadcast(tirx.IntImm("int16", 1), 16)
    pairs = tirx.call_llvm_pure_intrin("int16x16", "llvm.x86.avx2.pmadd.ub.sw", a, b)
    return acc + tirx.call_llvm_pure_intrin("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, ones)


def _int8_kernel(isa: Isa) -> tirx.PrimFunc:
    """Each step's codes are the last step's sums, so that no product can be moved out of the loop."""
    lanes = _int8_lanes(isa)

    def step(value: Any) -> Any:
        codes = tirx.reinterpret(f"uint8x{4 * lanes}", value)
        return _int8_step(isa, value, codes, codes)

    @T.prim_func(s_tir=True)
    def multiply_add(out: T.Buffer((1, LANES), "int32")) -> None:
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        with T.sblock("thread"):
            T.reads()
            T.writes()
            acc = T.sblock_alloc_buffer((_INT8_CHAINS, lanes), "int32", scope="local")
            for c in T.unroll(_INT8_CHAINS):
                acc[c, T.ramp(0, 1, lanes)] = out[0, T.ramp(0, 1, lanes)] + c
            for _ in T.serial(_ROUNDS):
                for c in T.unroll(_INT8_CHAINS):
                    acc[c, T.ramp(0, 1, lanes)] = step(acc[c, T.ramp(0, 1, lanes)])
            for c in T.unroll(_INT8_CHAINS):
                out[0, T.ramp(0, 1, lanes)] = out[0, T.ramp(0, 1, lanes)] + acc[c, T.ramp(0, 1, lanes)]

    return multiply_add
