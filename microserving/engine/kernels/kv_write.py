# mypy: disable-error-code="untyped-decorator"
"""Writing K/V rows into pages: the local append, the guarded put into another engine's mapped pool, the time stamps.

Owns: the three kernels (TVMScript PrimFuncs), how they read the clock and a lease word. Knows the pool layout of
``protocol.kv_layout``; a remote pool is only a tensor with a page count of its own. Times are CLOCK_MONOTONIC nanoseconds (``time.monotonic_ns``), read by the compiled
code itself, so that no Python runs between layers.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm import tirx
from tvm.script import tirx as T  # noqa: N812

from microserving.engine.kernels.common import LANES
from microserving.engine.kernels.transfer import GUARD_ID, GUARD_WORD, PUT_BEGIN, PUT_END
from microserving.protocol.kv_layout import KVDtype

_CLOCK_MONOTONIC = 1
_SERIAL_ROWS = 32  # below this, waking the other threads costs more than the copy


def _row_writer(kv_heads: int, head_dim: int, page_size: int, dtype: KVDtype) -> Any:
    """An inline that writes row i of k and v to its slot of pool[layer]; a negative slot is skipped."""
    HK, D, PS = kv_heads, head_dim, page_size

    @T.inline
    def write_row(i, k, v, slots, pool, layer):  # type: ignore[no-untyped-def]
        slot: T.let[T.int32] = slots[i]
        if slot >= 0:
            for h in T.serial(HK):
                for d in T.serial(D):
                    pool[layer, slot // PS, 0, h, d * PS + slot % PS] = T.cast(k[i, h, d], dtype)
                for c in T.unroll(D // LANES):
                    pool[layer, slot // PS, 1, h, T.ramp(slot % PS * D + c * LANES, 1, LANES)] = T.cast(
                        v[i, h, T.ramp(c * LANES, 1, LANES)], f"{dtype}x{LANES}"
                    )

    return write_row


@functools.lru_cache
def append_kernel(kv_heads: int, head_dim: int, page_size: int, kv_dtype: KVDtype) -> tirx.PrimFunc:
    """f(k, v, slots, pool, layer): K/V rows into the engine's own pool, in place (index 3).

    k, v: float32 [rows, kv_heads, head_dim]; slots: int32 [rows], page * page_size + offset, negative = skip;
    pool: the KV layout's shape; layer: int64.
    """
    HK, D, PS = kv_heads, head_dim, page_size
    write_row = _row_writer(HK, D, PS, kv_dtype)

    @T.prim_func(s_tir=True)
    def append(
        k_handle: T.handle, v_handle: T.handle, slots_handle: T.handle, pool_handle: T.handle, layer: T.int64
    ) -> None:
        T.func_attr({"global_symbol": "kv_append", "tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        layers = T.int64()
        pages = T.int64()
        k = T.match_buffer(k_handle, (n, HK, D), "float32")
        v = T.match_buffer(v_handle, (n, HK, D), "float32")
        slots = T.match_buffer(slots_handle, (n,), "int32")
        pool = T.match_buffer(pool_handle, (layers, pages, 2, HK, PS * D), kv_dtype)
        if n < T.int64(_SERIAL_ROWS):
            for i in T.serial(n):
                write_row(i, k, v, slots, pool, layer)
        else:
            for i in T.parallel(n):
                write_row(i, k, v, slots, pool, layer)

    return append


@T.inline
def read_lease_word(held: Any, leases: Any, word: Any) -> None:
    """held[0] = leases[word], read again each time: another process changes it.

    A volatile copy of 8 bytes is one load; TVM has no volatile or atomic load of its own, and LLVM takes a plain one out
    of a loop, because it may assume that nobody else writes an argument's memory.
    """
    T.evaluate(
        T.call_llvm_intrin(
            "void",
            "llvm.memcpy",
            T.address_of(held[0]),
            T.address_of(leases[word]),
            T.int64(8),
            T.bool(True),  # "isvolatile"
        )
    )


@T.inline
def read_clock(clock: Any, times: Any, layer: Any, column: Any) -> None:
    """times[layer, column] = now. libc's clock_gettime; the call is opaque, so LLVM neither drops nor moves it."""
    if T.call_extern("int32", "clock_gettime", _CLOCK_MONOTONIC, clock.data) == 0:
        times[layer, column] = clock[0] * T.int64(1_000_000_000) + clock[1]


@functools.lru_cache
def put_kernel(kv_heads: int, head_dim: int, page_size: int, kv_dtype: KVDtype) -> tirx.PrimFunc:
    """f(k, v, slots, guards, remote_pool, leases, layer, times): rows into another engine's pool, with the times.

    As append, but a row is skipped also when its guard does not hold. guards: int64 [rows, 2]; leases: int64 [words].
    Writes times[layer, PUT_BEGIN] before and times[layer, PUT_END] after the rows. In place: times (index 7), so that
    the call has a result that a later stamp or the step's output needs; remote_pool is written too.
    """
    HK, D, PS = kv_heads, head_dim, page_size
    write_row = _row_writer(HK, D, PS, kv_dtype)

    @T.inline
    def put_row(i, k, v, slots, guards, pool, leases, layer):  # type: ignore[no-untyped-def]
        with T.sblock("row"):
            T.reads()
            T.writes()
            held = T.sblock_alloc_buffer((1,), "int64", scope="local")
            read_lease_word(held, leases, guards[i, GUARD_WORD])
            if held[0] == guards[i, GUARD_ID]:
                write_row(i, k, v, slots, pool, layer)

    @T.prim_func(s_tir=True)
    def put(
        k_handle: T.handle,
        v_handle: T.handle,
        slots_handle: T.handle,
        guards_handle: T.handle,
        pool_handle: T.handle,
        leases_handle: T.handle,
        layer: T.int64,
        times_handle: T.handle,
    ) -> None:
        # no "noalias": a store to the pool must not be moved over the reading of the clock
        T.func_attr({"global_symbol": "kv_put", "tirx.is_scheduled": True})
        n = T.int64()
        layers = T.int64()
        pages = T.int64()
        k = T.match_buffer(k_handle, (n, HK, D), "float32")
        v = T.match_buffer(v_handle, (n, HK, D), "float32")
        slots = T.match_buffer(slots_handle, (n,), "int32")
        pool = T.match_buffer(pool_handle, (layers, pages, 2, HK, PS * D), kv_dtype)
        words = T.int64()
        guards = T.match_buffer(guards_handle, (n, 2), "int64")
        leases = T.match_buffer(leases_handle, (words,), "int64")
        times = T.match_buffer(times_handle, (layers, 3), "int64")
        with T.sblock("put"):
            T.reads()
            T.writes()
            clock = T.sblock_alloc_buffer(
                (2,), "int64", scope="local"
            )  # struct timespec: seconds, nanoseconds
            read_clock(clock, times, layer, PUT_BEGIN)
            if n < T.int64(_SERIAL_ROWS):
                for i in T.serial(n):
                    put_row(i, k, v, slots, guards, pool, leases, layer)
            else:
                for i in T.parallel(n):
                    put_row(i, k, v, slots, guards, pool, leases, layer)
            read_clock(clock, times, layer, PUT_END)

    return put


@functools.lru_cache
def stamp_kernel() -> tirx.PrimFunc:
    """f(times, layer, column): times[layer, column] = now, in place (index 0); layer and column: int64."""

    @T.prim_func(s_tir=True)
    def stamp(times_handle: T.handle, layer: T.int64, column: T.int64) -> None:
        T.func_attr({"global_symbol": "stamp", "tirx.is_scheduled": True})
        layers = T.int64()
        times = T.match_buffer(times_handle, (layers, 3), "int64")
        with T.sblock("stamp"):
            T.reads()
            T.writes()
            clock = T.sblock_alloc_buffer((2,), "int64", scope="local")
            read_clock(clock, times, layer, column)

    return stamp
