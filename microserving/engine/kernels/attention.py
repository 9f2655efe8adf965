# mypy: disable-error-code="untyped-decorator"
"""Causal paged attention for CPUs, the same bits whatever the batch, chunking, page placement, threads and ISA.

Owns: the prefill and decode kernels (TVMScript PrimFuncs). Knows the pool layout of ``protocol.kv_layout`` and the task
columns of ``plan``; knows no request and no model. Longer than other files: it generates two kernels from one body.

Why the bits are the same
  1. Every query row is computed by one body (``_attend``) from its own q, K and V only; tiles only group rows.
  2. The key axis is cut at absolute positions: blocks of KEY_BLOCK (one online-softmax step), spans of KEY_SPAN (a fresh
     state each, merged left to right). Decode runs spans on different threads; the merge order is fixed.
  3. In a block each score is one FMA chain over head_dim, the row sum is kept as 16 lanes, P.V is one FMA chain over keys.
  4. A masked key counts exactly 0, a wholly masked block or span is an identity (exp2(0) == 1, fma(0, v, o) == o).
  5. Every multiply-add is an explicit llvm.fma (see ``common``).

Blocking: ``_products`` keeps rows x vectors accumulators in registers; how many fit is all that the ISA decides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T  # noqa: N812
from tvm.tirx import Expr

from microserving.engine.kernels.common import (
    F32_LANES,
    LANES,
    LOG2_E,
    exp2,
    fma,
    lane_max,
    lane_sum,
    left_fold,
    splat,
)
from microserving.engine.kernels.isa import Isa
from microserving.engine.kernels.plan import KEY_BLOCK, KEY_SPAN, TASK_FIELDS, AttentionShape

LOWEST = float(np.finfo("float32").min)  # start of a running maximum; finite, since LOWEST - LOWEST must be 0
BLOCKS_PER_SPAN = KEY_SPAN // KEY_BLOCK
VECTORS_PER_BLOCK = KEY_BLOCK // LANES


def _lanes(vector: Expr | int = 0) -> Expr:
    """Index of the 16 elements of the given vector of a row."""
    return tirx.Ramp(vector * LANES, 1, LANES)


def _blocks_of(span: Expr, length: Expr) -> Expr:
    """How many key blocks of the span exist in a sequence of ``length`` keys."""
    return tirx.min(BLOCKS_PER_SPAN, (length - span * KEY_SPAN + (KEY_BLOCK - 1)) // KEY_BLOCK)


def _existing(slot: Expr, length: Expr) -> Expr:
    """The slot, or the last 16 slots instead of a page beyond the sequence: those keys are masked, whatever they hold."""
    return tirx.min(slot, (length - 1) // LANES * LANES)


def _blocking(rows: int, vectors: int, isa: Isa) -> tuple[int, int]:
    """(rows, vectors) of a register block for the product of rows and vectors; vectors is a divisor.

    Of the blocks whose accumulators and vector operands fit in registers, the one with the most FMAs per load (a load is a
    vector or the broadcast of a row's scalar), less what the padding of the last block wastes.
    """
    best, best_score = (1, 1), 0.0
    for width in (v for v in range(1, vectors + 1) if vectors % v == 0):
        height = min(rows, (isa.accumulators + 1 - width) // width)
        if height < 1:
            continue
        blocks = -(-rows // height)
        height = -(-rows // blocks)
        score = height * width / (height / 2 + width) * rows / (blocks * height)
        if score > best_score:
            best, best_score = (height, width), score
    return best


class _Block:
    """Geometry of one kernel: scratch rows and register blocks."""

    def __init__(self, shape: AttentionShape, isa: Isa, rows: int) -> None:
        self.dim_vectors = shape.head_dim // LANES
        self.score_rows, self.score_vectors = _blocking(rows, VECTORS_PER_BLOCK, isa)
        self.value_rows, self.value_vectors = _blocking(rows, self.dim_vectors, isa)
        self.score_panels = VECTORS_PER_BLOCK // self.score_vectors
        self.value_panels = self.dim_vectors // self.value_vectors
        step = math.lcm(self.score_rows, self.value_rows)
        self.rows = -(-rows // step) * step


def _attend(
    shape: AttentionShape, block: _Block, key: Callable[..., Expr], value: Callable[..., Expr]
) -> Any:
    """The one body: an inline that takes rows [0, rows) of the scratch through one key block.

    key(source, d, c): dimension d of the 16 keys of vector c; value(source, p, j, c): dimensions of vector c of key
    16 p + j. Row r sees the keys below limit + r // group of the block; keys from ``present`` on do not exist.
    """
    D, G = shape.head_dim, shape.group
    SR, SV, VR, VV = block.score_rows, block.score_vectors, block.value_rows, block.value_vectors
    DIMS, TOP = block.dim_vectors, D + LANES
    UNROLL = 4

    @T.inline
    def scores(source, r0, c0, q, s, acc):  # type: ignore[no-untyped-def]
        for i in T.unroll(SR * SV):
            acc[i, _lanes()] = splat(0.0)
        for d0 in T.serial(D // UNROLL):
            for d1 in T.unroll(UNROLL):
                for c in T.unroll(SV):
                    for r in T.unroll(SR):
                        acc[r * SV + c, _lanes()] = fma(
                            splat(q[r0 + r, d0 * UNROLL + d1]),
                            key(source, d0 * UNROLL + d1, c0 + c),
                            acc[r * SV + c, _lanes()],
                        )
        for r in T.unroll(SR):
            for c in T.unroll(SV):
                s[r0 + r, _lanes(c0 + c)] = acc[r * SV + c, _lanes()]

    @T.inline
    def softmax(r, seen, s, state, factor):  # type: ignore[no-untyped-def]
        if seen < KEY_BLOCK:
            for c in T.unroll(VECTORS_PER_BLOCK):
                s[r, _lanes(c)] = T.Select(
                    _lanes(c) < T.broadcast(seen, LANES), s[r, _lanes(c)], splat(float("-inf"))
                )
        before: T.let[T.float32] = state[r, TOP]
        now: T.let[T.float32] = T.max(
            before, lane_max(left_fold(tirx.max, [s[r, _lanes(c)] for c in range(VECTORS_PER_BLOCK)]))
        )
        state[r, TOP] = now
        factor[_lanes()] = exp2(splat(before - now))
        for c in T.unroll(VECTORS_PER_BLOCK):
            s[r, _lanes(c)] = exp2(s[r, _lanes(c)] - splat(now))
        if seen < KEY_BLOCK:
            for c in T.unroll(VECTORS_PER_BLOCK):
                s[r, _lanes(c)] = T.Select(_lanes(c) < T.broadcast(seen, LANES), s[r, _lanes(c)], splat(0.0))
        state[r, _lanes(DIMS)] = fma(
            state[r, _lanes(DIMS)],
            factor[_lanes()],
            left_fold(lambda x, y: x + y, [s[r, _lanes(c)] for c in range(VECTORS_PER_BLOCK)]),
        )
        for c in T.unroll(DIMS):
            state[r, _lanes(c)] = state[r, _lanes(c)] * factor[_lanes()]

    @T.inline
    def add_key(source, r0, c0, p, j, s, acc):  # type: ignore[no-untyped-def]
        for c in T.unroll(VV):
            for r in T.unroll(VR):
                acc[r * VV + c, _lanes()] = fma(
                    splat(s[r0 + r, p * LANES + j]),
                    value(source, p, j, c0 + c),
                    acc[r * VV + c, _lanes()],
                )

    @T.inline
    def values(source, r0, c0, present, s, state, acc):  # type: ignore[no-untyped-def]
        for r in T.unroll(VR):
            for c in T.unroll(VV):
                acc[r * VV + c, _lanes()] = state[r0 + r, _lanes(c0 + c)]
        for p in T.serial(VECTORS_PER_BLOCK):
            if present >= (p + 1) * LANES:
                for j0 in T.serial(LANES // UNROLL):
                    for j1 in T.unroll(UNROLL):
                        add_key(source, r0, c0, p, j0 * UNROLL + j1, s, acc)
            else:  # never a key beyond the end: a free slot may hold NaN, and 0 * NaN is NaN
                for j in T.serial(T.max(0, present - p * LANES)):
                    add_key(source, r0, c0, p, j, s, acc)
        for r in T.unroll(VR):
            for c in T.unroll(VV):
                state[r0 + r, _lanes(c0 + c)] = acc[r * VV + c, _lanes()]

    @T.inline
    def attend(source, rows, limit, present, q, state, s, acc, factor):  # type: ignore[no-untyped-def]
        # panels of keys that do not exist yet keep stale scores, which softmax masks
        for c in T.serial(T.min(block.score_panels, (present + (SV * LANES - 1)) // (SV * LANES))):
            for r in T.serial((rows + (SR - 1)) // SR):
                scores(source, r * SR, c * SV, q, s, acc)
        for r in T.serial(rows):
            softmax(r, limit + r // G, s, state, factor)
        for c in T.serial(block.value_panels):
            for r in T.serial((rows + (VR - 1)) // VR):
                values(source, r * VR, c * VV, present, s, state, acc)

    return attend


@T.inline
def _clear(state, rows, dims):  # type: ignore[no-untyped-def]
    """Fresh softmax states of the rows [0, rows): nothing seen yet."""
    for r in T.serial(rows):
        for c in T.unroll(dims + 1):
            state[r, _lanes(c)] = splat(0.0)
        state[r, (dims + 1) * LANES] = T.float32(LOWEST)


@T.inline
def _merge(span, i, state, r, dims, factors):  # type: ignore[no-untyped-def]
    """Add the state of a span, row i of ``span``, to row r of ``state``, the spans before it."""
    before: T.let[T.float32] = state[r, (dims + 1) * LANES]
    other: T.let[T.float32] = span[i, (dims + 1) * LANES]
    now: T.let[T.float32] = T.max(before, other)
    factors[0, _lanes()] = exp2(splat(before - now))
    factors[1, _lanes()] = exp2(splat(other - now))
    state[r, (dims + 1) * LANES] = now
    for c in T.unroll(dims + 1):
        state[r, _lanes(c)] = fma(
            span[i, _lanes(c)], factors[1, _lanes()], state[r, _lanes(c)] * factors[0, _lanes()]
        )


@T.inline
def _finish(state, r, out, row, head, dims):  # type: ignore[no-untyped-def]
    """The head's part of out[row] = the output of row r, divided by the sum of its 16 lanes."""
    whole: T.let[T.float32] = lane_sum(state[r, _lanes(dims)])
    for c in T.unroll(dims):
        out[row, T.ramp((head * dims + c) * LANES, 1, LANES)] = state[r, _lanes(c)] / splat(whole)


@functools.lru_cache
def prefill_kernel(shape: AttentionShape, isa: Isa) -> tirx.PrimFunc:
    """f(q, pool, layer, table, tasks, thread_tasks, out): attention of the rows that a ``PrefillPlan`` names.

    q: float32 [rows, num_heads, head_dim]; out: float32 [rows, num_heads * head_dim]; pool: the KV layout's shape, K/V
    of the rows already in it; layer: int64; table: int32 [sequences, max_pages], entries behind a sequence's end are never
    read. Rows of out that no task names stay as they are.
    """
    H, HK, D, PS, G = shape.num_heads, shape.kv_heads, shape.head_dim, shape.page_size, shape.group
    dtype = shape.kv_dtype
    block = _Block(shape, isa, shape.query_tile * G)
    ROWS, DIMS, WIDTH = block.rows, block.dim_vectors, shape.state_width
    SV, VV = block.score_vectors, block.value_vectors
    scale = float(np.float32(LOG2_E / math.sqrt(D)))

    def key(source: Any, d: Expr, c: Expr) -> Expr:
        return source[0][c // SV, d, _lanes(c % SV)]

    def value(source: Any, p: Expr, j: Expr, c: Expr) -> Expr:
        return source[1][c // VV, p * LANES + j, _lanes(c % VV)]

    attend = _attend(shape, block, key, value)

    @T.inline
    def widen(pool, layer, page, offset, hk, p, keys, vals):  # type: ignore[no-untyped-def]
        """16 slots of a page, as float32 panels of the width that the register blocks read."""
        for d in T.serial(D):
            keys[p // SV, d, _lanes(p % SV)] = T.cast(
                pool[layer, page, 0, hk, T.ramp(d * PS + offset, 1, LANES)], F32_LANES
            )
        for j in T.serial(LANES):
            for c in T.unroll(DIMS):
                vals[c // VV, p * LANES + j, _lanes(c % VV)] = T.cast(
                    pool[layer, page, 1, hk, T.ramp((offset + j) * D + c * LANES, 1, LANES)], F32_LANES
                )

    @T.prim_func(s_tir=True)
    def prefill(
        q_handle: T.handle,
        pool_handle: T.handle,
        layer: T.int64,
        table_handle: T.handle,
        tasks_handle: T.handle,
        thread_tasks_handle: T.handle,
        out_handle: T.handle,
    ) -> None:
        T.func_attr({"global_symbol": "attention_prefill", "tirx.noalias": True, "tirx.is_scheduled": True})
        # int64 symbols make index arithmetic 64-bit: int32 offsets wrap in a pool of 2**31 elements
        n = T.int64()
        layers = T.int64()
        pages = T.int64()
        sequences = T.int64()
        max_pages = T.int64()
        num_tasks = T.int64()
        threads = T.int64()
        q = T.match_buffer(q_handle, (n, H, D), "float32")
        pool = T.match_buffer(pool_handle, (layers, pages, 2, HK, PS * D), dtype)
        table = T.match_buffer(table_handle, (sequences, max_pages), "int32")
        tasks = T.match_buffer(tasks_handle, (num_tasks, TASK_FIELDS), "int32")
        thread_tasks = T.match_buffer(thread_tasks_handle, (threads,), "int32")
        out = T.match_buffer(out_handle, (n, H * D), "float32")
        if num_tasks > T.int64(0):
            for thread in T.parallel(threads - T.int64(1)):
                with T.sblock("thread"):  # makes the scratch private to the thread
                    T.reads()
                    T.writes()
                    scaled_q = T.sblock_alloc_buffer((ROWS, D), "float32", scope="global")
                    # softmax states: of the span, and of the spans before it
                    state = T.sblock_alloc_buffer((ROWS, WIDTH), "float32", scope="global")
                    before = T.sblock_alloc_buffer((ROWS, WIDTH), "float32", scope="global")
                    s = T.sblock_alloc_buffer((ROWS, KEY_BLOCK), "float32", scope="global")
                    acc = T.sblock_alloc_buffer((isa.accumulators, LANES), "float32", scope="global")
                    factors = T.sblock_alloc_buffer((2, LANES), "float32", scope="global")
                    factor = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
                    keys = T.sblock_alloc_buffer(
                        (block.score_panels, D, SV * LANES), "float32", scope="global"
                    )
                    vals = T.sblock_alloc_buffer(
                        (block.value_panels, KEY_BLOCK, VV * LANES), "float32", scope="global"
                    )
                    for r in T.serial(ROWS):  # rows that pad the last register block stay finite
                        for c in T.unroll(DIMS):
                            scaled_q[r, _lanes(c)] = splat(0.0)
                    for i in T.serial(thread_tasks[thread + T.int64(1)] - thread_tasks[thread]):
                        task: T.let[T.int32] = thread_tasks[thread] + i
                        sequence: T.let[T.int32] = tasks[task, 0]
                        row: T.let[T.int32] = tasks[task, 1]
                        count: T.let[T.int32] = tasks[task, 2]
                        position: T.let[T.int32] = tasks[task, 3]
                        hk: T.let[T.int32] = tasks[task, 4]
                        rows: T.let[T.int32] = count * G  # scratch row = query * G + head of the group
                        length: T.let[T.int32] = position + count
                        for r in T.serial(rows):
                            for c in T.unroll(DIMS):
                                head: T.let[T.int32] = hk * G + r % G
                                scaled_q[r, _lanes(c)] = q[row + r // G, head, _lanes(c)] * splat(scale)
                        _clear(before, rows, DIMS)
                        for span in T.serial((length + (KEY_SPAN - 1)) // KEY_SPAN):
                            _clear(state, ROWS, DIMS)
                            for b in T.serial(_blocks_of(span, length)):
                                first: T.let[T.int32] = span * KEY_SPAN + b * KEY_BLOCK
                                for p in T.serial(VECTORS_PER_BLOCK):
                                    slot: T.let[T.int32] = _existing(first + p * LANES, length)
                                    page: T.let[T.int32] = table[sequence, slot // PS]
                                    widen(pool, layer, page, slot % PS, hk, p, keys, vals)
                                attend(
                                    (keys, vals),
                                    rows,
                                    position + 1 - first,
                                    length - first,
                                    scaled_q,
                                    state,
                                    s,
                                    acc,
                                    factor,
                                )
                            for r in T.serial(rows):
                                _merge(state, r, before, r, DIMS, factors)
                        for r in T.serial(rows):
                            _finish(before, r, out, row + r // G, hk * G + r % G, DIMS)

    return prefill


@functools.lru_cache
def decode_kernel(shape: AttentionShape, isa: Isa) -> tirx.PrimFunc:
    """f(q, pool, layer, table, tasks, thread_tasks, merges, workspace, out): the rows that a ``DecodePlan`` names.

    Arguments as of ``prefill_kernel``; workspace: float32 of at least the plan's shape, scratch, content meaningless.
    Writes only its own rows of out: give it the prefill kernel's output in place (index 8). Same bits as the prefill kernel.
    """
    H, HK, D, PS, G = shape.num_heads, shape.kv_heads, shape.head_dim, shape.page_size, shape.group
    dtype = shape.kv_dtype
    block = _Block(shape, isa, G)
    ROWS, DIMS, WIDTH = block.rows, block.dim_vectors, shape.state_width
    scale = float(np.float32(LOG2_E / math.sqrt(D)))

    def key(source: Any, d: Expr, c: Expr) -> Expr:
        pool, layer, table, sequence, hk, first, length = source
        slot = _existing(first + c * LANES, length)
        page = table[sequence, slot // PS]
        return tirx.Cast(F32_LANES, pool[layer, page, 0, hk, tirx.Ramp(d * PS + slot % PS, 1, LANES)])

    def value(source: Any, p: Expr, j: Expr, c: Expr) -> Expr:
        pool, layer, table, sequence, hk, first, _length = source
        slot = first + p * LANES
        page = table[sequence, slot // PS]
        return tirx.Cast(
            F32_LANES, pool[layer, page, 1, hk, tirx.Ramp((slot % PS + j) * D + c * LANES, 1, LANES)]
        )

    attend = _attend(shape, block, key, value)

    @T.prim_func(s_tir=True)
    def decode(
        q_handle: T.handle,
        pool_handle: T.handle,
        layer: T.int64,
        table_handle: T.handle,
        tasks_handle: T.handle,
        thread_tasks_handle: T.handle,
        merges_handle: T.handle,
        workspace_handle: T.handle,
        out_handle: T.handle,
    ) -> None:
        T.func_attr({"global_symbol": "attention_decode", "tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        layers = T.int64()
        pages = T.int64()
        sequences = T.int64()
        max_pages = T.int64()
        num_tasks = T.int64()
        threads = T.int64()
        num_merges = T.int64()
        slots = T.int64()
        q = T.match_buffer(q_handle, (n, H, D), "float32")
        pool = T.match_buffer(pool_handle, (layers, pages, 2, HK, PS * D), dtype)
        table = T.match_buffer(table_handle, (sequences, max_pages), "int32")
        tasks = T.match_buffer(tasks_handle, (num_tasks, TASK_FIELDS), "int32")
        thread_tasks = T.match_buffer(thread_tasks_handle, (threads,), "int32")
        merges = T.match_buffer(merges_handle, (num_merges, 4), "int32")
        workspace = T.match_buffer(workspace_handle, (slots, G, WIDTH), "float32")
        out = T.match_buffer(out_handle, (n, H * D), "float32")
        # the workspace with one index for both: slot * G + g
        states = T.decl_buffer((slots * T.int64(G), WIDTH), "float32", data=workspace.data)
        if num_tasks > T.int64(0):
            for thread in T.parallel(threads - T.int64(1)):
                with T.sblock("thread"):
                    T.reads()
                    T.writes()
                    scaled_q = T.sblock_alloc_buffer((ROWS, D), "float32", scope="global")
                    state = T.sblock_alloc_buffer((ROWS, WIDTH), "float32", scope="global")
                    s = T.sblock_alloc_buffer((ROWS, KEY_BLOCK), "float32", scope="global")
                    acc = T.sblock_alloc_buffer((isa.accumulators, LANES), "float32", scope="global")
                    factor = T.sblock_alloc_buffer((LANES,), "float32", scope="global")
                    for r in T.serial(ROWS):
                        for c in T.unroll(DIMS):
                            scaled_q[r, _lanes(c)] = splat(0.0)
                    for i in T.serial(thread_tasks[thread + T.int64(1)] - thread_tasks[thread]):
                        task: T.let[T.int32] = thread_tasks[thread] + i
                        sequence: T.let[T.int32] = tasks[task, 0]
                        row: T.let[T.int32] = tasks[task, 1]
                        span: T.let[T.int32] = tasks[task, 2]
                        length: T.let[T.int32] = tasks[task, 3] + 1
                        hk: T.let[T.int32] = tasks[task, 4]
                        slot: T.let[T.int32] = tasks[task, 5]
                        for g in T.serial(G):
                            for c in T.unroll(DIMS):
                                scaled_q[g, _lanes(c)] = q[row, hk * G + g, _lanes(c)] * splat(scale)
                        _clear(state, ROWS, DIMS)
                        for b in T.serial(_blocks_of(span, length)):
                            first: T.let[T.int32] = span * KEY_SPAN + b * KEY_BLOCK
                            attend(
                                (pool, layer, table, sequence, hk, first, length),
                                G,
                                length - first,
                                length - first,
                                scaled_q,
                                state,
                                s,
                                acc,
                                factor,
                            )
                        for g in T.serial(G):
                            if slot < 0:
                                _finish(state, g, out, row, hk * G + g, DIMS)
                            else:
                                for c in T.unroll(DIMS + 2):
                                    states[slot * G + g, _lanes(c)] = state[g, _lanes(c)]
        if num_merges > T.int64(0):
            for m in T.parallel(num_merges):
                with T.sblock("merge"):
                    T.reads()
                    T.writes()
                    state = T.sblock_alloc_buffer((1, WIDTH), "float32", scope="global")
                    factors = T.sblock_alloc_buffer((2, LANES), "float32", scope="global")
                    for g in T.serial(G):
                        _clear(state, 1, DIMS)
                        for x in T.serial(merges[m, 3]):
                            _merge(states, (merges[m, 2] + x) * G + g, state, 0, DIMS, factors)
                        _finish(state, 0, out, merges[m, 0], merges[m, 1] * G + g, DIMS)

    return decode
