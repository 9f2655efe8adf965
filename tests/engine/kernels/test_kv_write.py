"""append and put write exactly the given slots, put only while the row's guard holds; put and stamp say when."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tvm
from tvm import relax

from microserving.engine.kernels.isa import detect_isa
from microserving.engine.kernels.kv_write import append_kernel, put_kernel, stamp_kernel
from microserving.engine.kernels.transfer import LAYER_END, PUT_BEGIN, PUT_END
from microserving.protocol.kv_layout import KVDtype, KVLayout

Array = npt.NDArray[Any]
tensor = tvm.runtime.tensor
LAYERS, HEADS, DIM = 3, 2, 32


@functools.cache
def compiled(name: str, page_size: int = 16, dtype: KVDtype = "float16") -> Callable[..., Any]:
    function = {
        "append": lambda: append_kernel(HEADS, DIM, page_size, dtype),
        "put": lambda: put_kernel(HEADS, DIM, page_size, dtype),
        "stamp": stamp_kernel,
    }[name]()
    target = tvm.target.Target(detect_isa().target)
    with target:
        kernel: Callable[..., Any] = tvm.compile(
            tvm.IRModule({"f": function.with_attr("global_symbol", "f")}), target
        )["f"]
    return kernel


def empty_pool(pages: int, page_size: int, dtype: KVDtype) -> Array:
    return np.full(KVLayout(LAYERS, HEADS, DIM, page_size, dtype).shape(pages), np.nan, dtype)


def rows(n: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, n, HEADS, DIM)).astype("float32")
    return k, v


LEASES: Array = np.array([0, 0, 91, 12, 0], np.int64)


def holding(n: int) -> Array:
    """Guards of n rows, all of the lease in word 2."""
    return np.tile(np.array([2, 91], np.int64), (n, 1))


def expected_pool(pool: Array, k: Array, v: Array, slots: Array, layer: int, page_size: int) -> Array:
    """The layout's definition, element by element: K [head_dim, page_size], V [page_size, head_dim] in a page."""
    pool = pool.copy()
    for i, slot in enumerate(slots):
        if slot >= 0:
            page, offset = divmod(int(slot), page_size)
            for head in range(HEADS):
                pool[layer, page, 0, head].reshape(DIM, page_size)[:, offset] = k[i, head]
                pool[layer, page, 1, head].reshape(page_size, DIM)[offset] = v[i, head]
    return pool


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("n", [0, 1, 31, 200])  # 200: more rows than the kernel does serially
def test_append_and_put_write_the_given_slots_and_nothing_else(
    n: int, page_size: int, dtype: KVDtype
) -> None:
    (k, v), rng = rows(n), np.random.default_rng(1)
    own, remote = empty_pool(20, page_size, dtype), empty_pool(33, page_size, dtype)
    for name, pool in (("append", own), ("put", remote)):
        slots = rng.permutation(len(pool[0]) * page_size)[:n].astype("int32")
        slots[3::7] = -1
        target, times = tensor(pool), tensor(np.zeros((LAYERS, 3), "int64"))
        if name == "append":
            compiled(name, page_size, dtype)(tensor(k), tensor(v), tensor(slots), target, 1)
        else:
            guards = tensor(holding(n))
            leases = tensor(LEASES)
            compiled(name, page_size, dtype)(
                tensor(k), tensor(v), tensor(slots), guards, target, leases, 1, times
            )
        bits = f"uint{pool.itemsize * 8}"
        assert np.array_equal(
            target.numpy().view(bits), expected_pool(pool, k, v, slots, 1, page_size).view(bits)
        )


@pytest.mark.case("PD-03")
@pytest.mark.parametrize("n", [5, 200])  # serial and parallel
def test_a_put_skips_the_rows_whose_guard_does_not_hold(n: int) -> None:
    """Rows of four leases in turn: held, ended (word clear), ended (word given to lease 12), held."""
    (k, v), remote = rows(n), empty_pool(20, 16, "float16")
    slots = np.random.default_rng(2).permutation(20 * 16)[:n].astype("int32")
    leases: Array = np.array([70, 0, 12, 73], np.int64)
    guards = np.stack([np.arange(n) % 4, 70 + np.arange(n) % 4], axis=1)
    target, times = tensor(remote), tensor(np.zeros((LAYERS, 3), "int64"))
    compiled("put")(tensor(k), tensor(v), tensor(slots), tensor(guards), target, tensor(leases), 2, times)
    held = np.isin(np.arange(n) % 4, (0, 3))
    expected = expected_pool(remote, k, v, np.where(held, slots, -1), 2, 16)
    assert np.array_equal(target.numpy(), expected, equal_nan=True)
    assert times.numpy()[2, PUT_BEGIN] <= times.numpy()[2, PUT_END]


def test_half_rounding_is_ieee_nearest_even() -> None:
    values = np.array(
        [0.1, -0.1, 65504, 65519.9, 1e6, -1e6, 2049, 2051, 6e-8, 2.9e-8, 5.9604645e-8 * 1.5, -0.0], "float32"
    )
    k = np.resize(values, (1, HEADS, DIM)).astype("float32")
    pool = empty_pool(2, 16, "float16")
    target, slots = tensor(pool), np.array([17], "int32")
    compiled("append")(tensor(k), tensor(k), tensor(slots), target, 0)
    with np.errstate(over="ignore"):
        assert np.array_equal(
            target.numpy().view("uint16"), expected_pool(pool, k, k, slots, 0, 16).view("uint16")
        )


def test_put_and_stamp_read_the_monotonic_clock_in_order() -> None:
    """Python's monotonic_ns is CLOCK_MONOTONIC too: the times fall between readings taken around the calls."""
    k, v = rows(300)
    slots = np.arange(300, dtype="int32")
    pool, times = tensor(empty_pool(30, 16, "float16")), tensor(np.full((LAYERS, 3), -1, "int64"))
    begin = time.monotonic_ns()
    for layer in (0, 2):
        guards, leases = tensor(holding(300)), tensor(LEASES)
        compiled("put")(tensor(k), tensor(v), tensor(slots), guards, pool, leases, layer, times)
        compiled("stamp")(times, layer, LAYER_END)
    end = time.monotonic_ns()
    seen = times.numpy()
    first, last = seen[0], seen[2]
    order = [begin, first[PUT_BEGIN], first[PUT_END], first[LAYER_END], *last, end]
    assert order == sorted(order)
    assert first[PUT_BEGIN] < first[PUT_END]  # 300 rows take some time
    assert (seen[1] == -1).all()


def test_times_and_pools_inside_a_relax_function() -> None:
    """Layers as relax prim values, all writes in place: nothing is dropped, reordered or copied by the compiler."""
    n, layout = 40, KVLayout(LAYERS, HEADS, DIM, 16, "float16")
    run = _relax_function(n, layout)
    k, v = rows(n)
    slots = np.arange(n, dtype="int32")[::-1].copy()
    own, remote = empty_pool(5, 16, "float16"), empty_pool(9, 16, "float16")
    pool, peer, times = tensor(own), tensor(remote), tensor(np.zeros((LAYERS, 3), "int64"))
    begin = time.monotonic_ns()
    guards, leases = tensor(holding(n)), tensor(LEASES)
    run(tensor(k), tensor(v), tensor(slots), pool, tensor(slots + 64), guards, peer, leases, times)
    stamps = [begin, *times.numpy().reshape(-1), time.monotonic_ns()]
    assert stamps == sorted(stamps)
    for layer in range(LAYERS):
        own = expected_pool(own, k, v, slots, layer, 16)
        remote = expected_pool(remote, k, v, slots + 64, layer, 16)
    assert np.array_equal(pool.numpy(), own, equal_nan=True)
    assert np.array_equal(peer.numpy(), remote, equal_nan=True)


def _relax_function(n: int, layout: KVLayout) -> Callable[..., Any]:
    builder = relax.BlockBuilder()
    arguments = (layout.kv_heads, layout.head_dim, layout.page_size, layout.dtype)
    append, put, stamp = (
        builder.add_func(function.without_attr("global_symbol"), name)
        for name, function in (
            ("append", append_kernel(*arguments)),
            ("put", put_kernel(*arguments)),
            ("stamp", stamp_kernel()),
        )
    )
    tokens, slot_type = relax.TensorType((n, HEADS, DIM), "float32"), relax.TensorType((n,), "int32")
    pool_type, peer_type = (relax.TensorType(layout.shape(pages), layout.dtype) for pages in (5, 9))
    times_type = relax.TensorType((layout.layers, 3), "int64")
    guards_type, leases_type = relax.TensorType((n, 2), "int64"), relax.TensorType((len(LEASES),), "int64")
    types = [tokens, tokens, slot_type, pool_type, slot_type, guards_type, peer_type, leases_type, times_type]
    k, v, slots, pool, peer_slots, guards, peer, leases, times = variables = [
        relax.Var(f"x{i}", x) for i, x in enumerate(types)
    ]
    with builder.function("main", variables):
        with builder.dataflow():
            for layer in map(relax.prim_value, range(layout.layers)):
                call = relax.op.call_tir_inplace
                pool = builder.emit(call(append, relax.Tuple([k, v, slots, pool, layer]), [3], pool_type))
                inputs = relax.Tuple([k, v, peer_slots, guards, peer, leases, layer, times])
                times = builder.emit(call(put, inputs, [7], times_type))
                inputs = relax.Tuple([times, layer, relax.prim_value(LAYER_END)])
                times = builder.emit(call(stamp, inputs, [0], times_type))
            result = builder.emit_output(relax.Tuple([pool, times]))
        builder.emit_func_output(result)
    target = tvm.target.Target(detect_isa().target)
    with target:
        machine = relax.VirtualMachine(tvm.compile(builder.get(), target), tvm.cpu())
    main: Callable[..., Any] = machine["main"]
    return main
