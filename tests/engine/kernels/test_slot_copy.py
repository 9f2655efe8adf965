"""The copy of slots: bit-exact wherever they lie, all layers, and nothing else; stopped by its lease word at once."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st

from microserving.engine.kernels.isa import detect_isa
from microserving.engine.kernels.slot_copy import copy_kernel
from microserving.engine.kernels.transfer import COPY, PUT_BEGIN, PUT_END, copy_runs
from microserving.protocol.kv_layout import KVDtype, KVLayout

Array = npt.NDArray[Any]
tensor = tvm.runtime.tensor
LAYERS, HEADS, DIM = 3, 2, 32
LEASES: Array = np.array([0, 55, 0, 44], np.int64)


@functools.cache
def compiled(page_size: int, dtype: KVDtype) -> Callable[..., Any]:
    target = tvm.target.Target(detect_isa().target)
    with target:
        module = tvm.compile(tvm.IRModule({COPY: copy_kernel(HEADS, DIM, page_size, dtype)}), target)
    kernel: Callable[..., Any] = module[COPY]
    return kernel


def random_pool(pages: int, page_size: int, dtype: KVDtype, seed: int) -> Array:
    """Any bits at all: a copy must not look at them (nan, subnormal)."""
    layout = KVLayout(LAYERS, HEADS, DIM, page_size, dtype)
    memory = np.random.default_rng(seed).integers(0, 256, layout.bytes_per_page * pages, np.uint8)
    return memory.view(f"uint{layout.itemsize * 8}").reshape(layout.shape(pages))


def copied(source: Array, target: Array, slots: tuple[Array, Array], page_size: int, layers: int) -> Array:
    """The layout's definition, slot by slot: K [head_dim, page_size], V [page_size, head_dim] in a page."""
    result = target.copy()
    for a, b in zip(*slots, strict=True):
        (p, i), (q, j) = divmod(int(a), page_size), divmod(int(b), page_size)
        for layer in range(layers):
            for head in range(HEADS):
                result[layer, q, 0, head].reshape(DIM, page_size)[:, j] = source[layer, p, 0, head].reshape(
                    DIM, page_size
                )[:, i]
                result[layer, q, 1, head].reshape(page_size, DIM)[j] = source[layer, p, 1, head].reshape(
                    page_size, DIM
                )[i]
    return result


def placements(page_size: int, source_pages: int, target_pages: int) -> dict[str, tuple[Array, Array]]:
    """Sources and targets: whole pages; one page's beginning; another offset; single slots; nothing."""
    rng = np.random.default_rng(page_size)
    position = np.arange(5 * page_size - 3)
    from_pages, to_pages = rng.permutation(source_pages), rng.permutation(target_pages)

    def at(pages: Array, positions: Array) -> Array:
        return (pages[positions // page_size] * page_size + positions % page_size).astype(np.int32)

    n = len(position)
    scattered = rng.permutation(source_pages * page_size)[:n], rng.permutation(target_pages * page_size)[:n]
    return {
        "pages": (at(from_pages, position), at(to_pages, position)),
        "partial": (at(from_pages, position[:7]), at(to_pages, position[:7])),
        "shifted": (at(from_pages, position), at(to_pages, position + 5)),
        "scattered": (scattered[0].astype(np.int32), scattered[1].astype(np.int32)),
        "nothing": (np.zeros(0, np.int32), np.zeros(0, np.int32)),
    }


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_a_copy_is_bit_exact_wherever_the_slots_lie(page_size: int, dtype: KVDtype) -> None:
    source, target = random_pool(9, page_size, dtype, 1), random_pool(7, page_size, dtype, 2)
    for where, slots in placements(page_size, 9, 7).items():
        pool, times = tensor(target.view(dtype)), tensor(np.zeros((LAYERS, 3), "int64"))
        begin = time.monotonic_ns()
        compiled(page_size, dtype)(
            tensor(copy_runs(*slots, page_size)),
            tensor(np.array([3, 44], np.int64)),
            tensor(source.view(dtype)),
            pool,
            tensor(LEASES),
            times,
        )
        expected = copied(source, target, slots, page_size, LAYERS)
        assert np.array_equal(pool.numpy().view(expected.dtype), expected), where
        stamps = [begin, *times.numpy()[:, [PUT_BEGIN, PUT_END]].reshape(-1), time.monotonic_ns()]
        assert stamps == sorted(stamps)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_copy_inside_one_pool(dtype: KVDtype) -> None:
    """Copy on write: the first tokens of one page into another page of the same memory."""
    pool = random_pool(9, 16, dtype, 3)
    slots = np.arange(5 * 16, 5 * 16 + 11, dtype=np.int32), np.arange(2 * 16, 2 * 16 + 11, dtype=np.int32)
    same, times = tensor(pool.view(dtype)), tensor(np.zeros((LAYERS, 3), "int64"))
    guard = tensor(np.array([1, 55], np.int64))
    compiled(16, dtype)(tensor(copy_runs(*slots, 16)), guard, same, same, tensor(LEASES), times)
    expected = copied(pool, pool, slots, 16, LAYERS)
    assert np.array_equal(same.numpy().view(expected.dtype), expected)


@pytest.mark.case("PD-03")
@pytest.mark.parametrize("word", [[0, 44], [1, 44], [1, 54]])
def test_a_copy_whose_guard_does_not_hold_writes_nothing(word: Sequence[int]) -> None:
    source, target = random_pool(9, 16, "float16", 1), random_pool(7, 16, "float16", 2)
    slots = placements(16, 9, 7)["pages"]
    pool, times = tensor(target.view("float16")), tensor(np.zeros((LAYERS, 3), "int64"))
    guard = tensor(np.array(word, np.int64))
    arguments = tensor(copy_runs(*slots, 16)), guard, tensor(source.view("float16"))
    compiled(16, "float16")(*arguments, pool, tensor(LEASES), times)
    assert np.array_equal(pool.numpy().view("uint16"), target)


@pytest.mark.case("PD-03")
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_lease_word_that_changes_during_a_copy_stops_it(layer: int) -> None:
    """The copy itself changes the word: it lies in the target, under the slot of ``layer`` that the first run writes.

    So what the kernel reads before the second run, and before later layers, is another word than it began with.
    """
    source, target = random_pool(9, 16, "float16", 1), random_pool(7, 16, "float16", 2)
    words = target.reshape(-1).view(np.int64)
    word = target[:layer].nbytes // 8 + target[layer, :4].nbytes // 8  # K of page 4 in ``layer``
    guard = np.array([word, words[word]], np.int64)
    slots = np.arange(32, 64, dtype=np.int32), np.arange(64, 96, dtype=np.int32)  # pages 2, 3 -> 4, 5
    pool, times = tensor(target.view("float16")), tensor(np.zeros((LAYERS, 3), "int64"))
    same_memory = tvm.runtime.from_dlpack(np.from_dlpack(pool).reshape(-1).view(np.int64))
    arguments = tensor(copy_runs(*slots, 16)), tensor(guard), tensor(source.view("float16"))
    compiled(16, "float16")(*arguments, pool, same_memory, times)
    expected = copied(source, target, slots, 16, layer)  # all of the layers before
    first_run = copied(source, target, (slots[0][:16], slots[1][:16]), 16, LAYERS)
    expected[layer] = first_run[layer]
    assert np.array_equal(pool.numpy().view("uint16"), expected)
    assert (times.numpy()[:, PUT_END] > 0).all()


@given(st.data(), st.sampled_from([16, 32, 64]))
def test_runs_say_the_same_as_slots_and_cross_no_page(data: st.DataObject, page_size: int) -> None:
    starts = st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 150))
    parts = data.draw(st.lists(starts, max_size=6))
    source = np.array([a + i for a, _, n in parts for i in range(n)], np.int32)
    target = np.array([b + i for _, b, n in parts for i in range(n)], np.int32)
    runs = copy_runs(source, target, page_size)
    assert [a + i for a, _, n in runs.tolist() for i in range(n)] == source.tolist()
    assert [b + i for _, b, n in runs.tolist() for i in range(n)] == target.tolist()
    for a, b, n in runs.tolist():
        assert a // page_size == (a + n - 1) // page_size
        assert b // page_size == (b + n - 1) // page_size
    assert len(runs) <= sum(2 + 2 * n // page_size + 1 for _, _, n in parts)
