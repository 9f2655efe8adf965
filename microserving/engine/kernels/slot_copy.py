# mypy: disable-error-code="untyped-decorator"
"""Copying K/V that is already in a pool, all layers at once: into other pages of the pool or another engine's pool.

Owns: the kernel; its orders are made by ``transfer.copy_runs``. Serial, so that any thread may call it beside a step: TVM's
workers belong to the step's thread.
"""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

from microserving.engine.kernels.kv_write import read_clock, read_lease_word
from microserving.engine.kernels.transfer import (
    COPY,
    GUARD_ID,
    GUARD_WORD,
    LENGTH,
    PUT_BEGIN,
    PUT_END,
    SOURCE,
    TARGET,
)
from microserving.protocol.kv_layout import KVDtype


@functools.lru_cache
def copy_kernel(kv_heads: int, head_dim: int, page_size: int, kv_dtype: KVDtype) -> tirx.PrimFunc:
    """f(runs, guard, source_pool, target_pool, leases, times): copies every run in layer 0, then in layer 1, ..

    Before each run of each layer leases[guard word] is read; the run is skipped unless it is the guard's id. guard: int64
    [2]; times: int64 [layers, 3], columns PUT_BEGIN and PUT_END are written. The pools may be one when no slot is both
    source and target: the kernel assumes that its arguments do not overlap, and what it touches does not.
    """
    HK, D, PS = kv_heads, head_dim, page_size

    @T.inline
    def copy_run(r, runs, source_pool, target_pool, layer):  # type: ignore[no-untyped-def]
        source: T.let[T.int32] = runs[r, SOURCE]
        target: T.let[T.int32] = runs[r, TARGET]
        length: T.let[T.int32] = runs[r, LENGTH]
        for h in T.serial(HK):
            if length == PS:  # whole pages: K and V are contiguous
                for e in T.serial(PS * D):
                    target_pool[layer, target // PS, 0, h, e] = source_pool[layer, source // PS, 0, h, e]
            else:
                for d in T.serial(D):
                    for i in T.serial(length):
                        target_pool[layer, target // PS, 0, h, d * PS + target % PS + i] = source_pool[
                            layer, source // PS, 0, h, d * PS + source % PS + i
                        ]
            for e in T.serial(length * D):
                target_pool[layer, target // PS, 1, h, target % PS * D + e] = source_pool[
                    layer, source // PS, 1, h, source % PS * D + e
                ]

    @T.prim_func(s_tir=True)
    def copy(
        runs_handle: T.handle,
        guard_handle: T.handle,
        source_handle: T.handle,
        target_handle: T.handle,
        leases_handle: T.handle,
        times_handle: T.handle,
    ) -> None:
        T.func_attr({"global_symbol": COPY, "tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        layers = T.int64()
        source_pages = T.int64()
        target_pages = T.int64()
        words = T.int64()
        runs = T.match_buffer(runs_handle, (n, 3), "int32")
        guard = T.match_buffer(guard_handle, (2,), "int64")
        source_pool = T.match_buffer(source_handle, (layers, source_pages, 2, HK, PS * D), kv_dtype)
        target_pool = T.match_buffer(target_handle, (layers, target_pages, 2, HK, PS * D), kv_dtype)
        leases = T.match_buffer(leases_handle, (words,), "int64")
        times = T.match_buffer(times_handle, (layers, 3), "int64")
        with T.sblock("copy"):
            T.reads()
            T.writes()
            clock = T.sblock_alloc_buffer((2,), "int64", scope="local")
            held = T.sblock_alloc_buffer((1,), "int64", scope="local")
            for layer in T.serial(layers):
                read_clock(clock, times, layer, PUT_BEGIN)
                for r in T.serial(n):
                    read_lease_word(held, leases, guard[GUARD_WORD])
                    if held[0] == guard[GUARD_ID]:
                        copy_run(r, runs, source_pool, target_pool, layer)
                read_clock(clock, times, layer, PUT_END)

    return copy
