"""Paged attention against float64 numpy, and bit for bit against itself however the work is cut."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.engine.kernels.attention import decode_kernel, prefill_kernel
from microserving.engine.kernels.isa import Isa, detect_isa, make_isa
from microserving.engine.kernels.kv_write import append_kernel
from microserving.engine.kernels.plan import AttentionShape, plan_attention, plan_decode, plan_prefill
from microserving.protocol.kv_layout import KVDtype, KVLayout

Array = npt.NDArray[Any]
Kernel = Literal["prefill", "decode", "mixed"]
tensor = tvm.runtime.tensor
LAYERS, LAYER, JUNK_PAGE = 2, 1, 2**30

SMOL16 = AttentionShape(9, 3, 64, 16, "float16")
SMOL32 = AttentionShape(9, 3, 64, 16, "float32")
TINY = AttentionShape(4, 4, 16, 16, "float16")
SHAPES = [
    SMOL16,
    SMOL32,
    AttentionShape(8, 2, 128, 32, "float16"),
    AttentionShape(4, 4, 80, 16, "float32"),
    AttentionShape(7, 1, 32, 64, "float16"),
    TINY,
]


@functools.cache
def compiled(
    shape: AttentionShape, isa: Isa
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(prefill, decode, append), compiled once per shape for the whole module."""
    target = tvm.target.Target(isa.target)
    append = append_kernel(shape.kv_heads, shape.head_dim, shape.page_size, shape.kv_dtype)
    functions = [prefill_kernel(shape, isa), decode_kernel(shape, isa), append]
    with target:
        return tuple(
            tvm.compile(tvm.IRModule({"f": f.with_attr("global_symbol", "f")}), target)["f"]
            for f in functions
        )


@dataclass
class Sequence:
    """q, k, v: float32 [length, heads, head_dim]; computed: positions whose K/V is in the pool."""

    q: Array
    k: Array
    v: Array
    pages: Array
    computed: int = 0

    @property
    def length(self) -> int:
        return len(self.q)


class Rig:
    """A pool full of NaN with shuffled pages, and steps over it the way the engine makes them."""

    def __init__(
        self, shape: AttentionShape, *, threads: int = 1, isa: Isa | None = None, seed: int = 0
    ) -> None:
        self.shape, self.threads, pages = shape, threads, 400
        self.prefill, self.decode, self.append = compiled(shape, isa or detect_isa())
        self.free = list(np.random.default_rng(seed).permutation(pages))
        layout = KVLayout(LAYERS, shape.kv_heads, shape.head_dim, shape.page_size, shape.kv_dtype)
        self.pool = tensor(np.full(layout.shape(pages), np.nan, shape.kv_dtype))

    def sequence(self, data: tuple[Array, Array, Array]) -> Sequence:
        pages = -(-len(data[0]) // self.shape.page_size)
        return Sequence(*data, np.array([self.free.pop() for _ in range(pages)]))

    def step(self, batch: list[tuple[Sequence, int]], kernel: Kernel = "mixed") -> list[Array]:
        """Append and attend the next n positions of each sequence: float32 [n, heads, head_dim] for each."""
        starts = np.array([sequence.computed for sequence, _ in batch])
        counts = np.array([n for _, n in batch])
        chosen = [np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
        pairs = list(zip([sequence for sequence, _ in batch], chosen, strict=True))
        self._append(pairs)
        q = np.concatenate([s.q[at] for s, at in pairs])
        out = self._attend(q, self._table(batch), starts, counts, kernel)
        return np.split(out, np.cumsum(counts)[:-1])

    def _append(self, pairs: list[tuple[Sequence, Array]]) -> None:
        size = self.shape.page_size
        k, v = np.concatenate([s.k[at] for s, at in pairs]), np.concatenate([s.v[at] for s, at in pairs])
        slots = np.concatenate([s.pages[at // size] * size + at % size for s, at in pairs]).astype("int32")
        self.append(tensor(k), tensor(v), tensor(slots), self.pool, LAYER)

    def _table(self, batch: list[tuple[Sequence, int]]) -> Array:
        """Page tables with a page that is not there behind each sequence's last: touching it would crash."""
        for sequence, n in batch:
            sequence.computed += n
        table = np.full((len(batch), max(len(s.pages) for s, _ in batch) + 1), JUNK_PAGE, "int32")
        for row, (sequence, _) in zip(table, batch, strict=True):
            used = -(-sequence.computed // self.shape.page_size)
            row[:used] = sequence.pages[:used]
        return table

    def _attend(self, q: Array, table: Array, starts: Array, counts: Array, kernel: Kernel) -> Array:
        plan = plan_attention(self.shape, self.threads, starts=starts, counts=counts)
        prefill, decode, every = plan.prefill, plan.decode, np.arange(len(counts))
        rows = np.cumsum(counts) - counts
        if kernel == "prefill":
            prefill = plan_prefill(
                self.shape, self.threads, sequences=every, rows=rows, starts=starts, counts=counts
            )
            decode = plan_decode(self.shape, self.threads, sequences=[], rows=[], positions=[])
        elif kernel == "decode":
            assert (counts == 1).all()
        out = tensor(np.full((len(q), self.shape.num_heads * self.shape.head_dim), np.nan, "float32"))
        shared = tensor(q), self.pool, LAYER, tensor(table)
        self.prefill(*shared, tensor(prefill.tasks), tensor(prefill.thread_tasks), out)
        lists = tensor(decode.tasks), tensor(decode.thread_tasks), tensor(decode.merges)
        self.decode(*shared, *lists, tensor(np.full(decode.workspace, np.nan, "float32")), out)
        result: Array = out.numpy().reshape(q.shape)
        return result

    def whole(self, data: tuple[Array, Array, Array]) -> Array:
        """All positions in one prefill, alone."""
        sequence = self.sequence(data)
        return self.step([(sequence, sequence.length)], "prefill")[0]


def random_data(shape: AttentionShape, length: int, seed: int = 7) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    heads = (shape.num_heads, shape.kv_heads, shape.kv_heads)
    q, k, v = ((rng.standard_normal((length, h, shape.head_dim)) * 1.5).astype("float32") for h in heads)
    return q, k, v


def reference(data: tuple[Array, Array, Array], dtype: KVDtype) -> Array:
    """Causal softmax attention in float64 over K/V rounded to the pool's dtype."""
    q = data[0].astype("float64")
    k, v = (x.astype(dtype).astype("float64") for x in data[1:])
    group = q.shape[1] // k.shape[1]
    out = np.empty(q.shape)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2])
        scores[np.triu_indices(len(q), 1)] = -np.inf
        weights = np.exp(scores - scores.max(1, keepdims=True))
        out[:, head] = weights @ v[:, head // group] / weights.sum(1, keepdims=True)
    return out


def label(shape: AttentionShape) -> str:
    return f"{shape.num_heads}/{shape.kv_heads}x{shape.head_dim}-page{shape.page_size}-{shape.kv_dtype}"


@pytest.mark.parametrize("shape", SHAPES, ids=label)
@pytest.mark.parametrize("length", [1, 17, 64, 1100])
def test_prefill_matches_float64(shape: AttentionShape, length: int) -> None:
    data = random_data(shape, length)
    assert np.abs(Rig(shape).whole(data) - reference(data, shape.kv_dtype)).max() < 2e-5


@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_decode_gives_the_bits_of_the_prefill_row(shape: AttentionShape) -> None:
    """Across page, block (64) and span (512, 1024) edges; the decode rows start at every edge from below."""
    data = random_data(shape, 1030)
    whole = Rig(shape).whole(data)
    rig = Rig(shape, threads=2, seed=1)
    sequence = rig.sequence(data)
    for edge in (16, 64, 512, 1024):
        if edge - 2 > sequence.computed:
            rig.step([(sequence, edge - 2 - sequence.computed)], "prefill")
        while sequence.computed < edge + 3:
            position = sequence.computed
            assert np.array_equal(rig.step([(sequence, 1)], "decode")[0][0], whole[position]), position


@pytest.mark.parametrize("shape", [SMOL16, SMOL32], ids=label)
@pytest.mark.parametrize("chunk", [1, 61, 256])
def test_any_chunking_gives_the_same_bits(shape: AttentionShape, chunk: int) -> None:
    data = random_data(shape, 150 if chunk == 1 else 700)
    rig = Rig(shape)
    sequence = rig.sequence(data)
    parts = []
    while sequence.computed < sequence.length:
        parts += rig.step([(sequence, min(chunk, sequence.length - sequence.computed))], "prefill")
    assert np.array_equal(np.concatenate(parts), Rig(shape, seed=3).whole(data))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_mixed_batch_gives_the_bits_of_each_sequence_alone(threads: int) -> None:
    """Uneven chunks and single rows of three sequences in one step: both kernels write one output."""
    datas = [random_data(SMOL16, length, seed) for seed, length in enumerate((900, 530, 37))]
    rig, rng = Rig(SMOL16, threads=threads), np.random.default_rng(5)
    sequences = [rig.sequence(data) for data in datas]
    parts: list[list[Array]] = [[], [], []]
    while left := [i for i, s in enumerate(sequences) if s.computed < s.length]:
        sizes = [
            min(int(rng.choice([1, 1, 2, 90, 250])), sequences[i].length - sequences[i].computed)
            for i in left
        ]
        outs = rig.step([(sequences[i], n) for i, n in zip(left, sizes, strict=True)])
        for i, out in zip(left, outs, strict=True):
            parts[i].append(out)
    for data, part in zip(datas, parts, strict=True):
        assert np.array_equal(np.concatenate(part), Rig(SMOL16, seed=9).whole(data))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_page_size_and_placement_do_not_change_the_bits(dtype: KVDtype) -> None:
    shapes = [AttentionShape(6, 2, 32, size, dtype) for size in (16, 32, 64)]
    data = random_data(shapes[0], 333)
    outs = [Rig(shape, seed=seed).whole(data) for seed, shape in enumerate(shapes)]
    assert np.array_equal(outs[0], outs[1])
    assert np.array_equal(outs[0], outs[2])
    assert np.array_equal(outs[0], Rig(shapes[0], seed=11, threads=2).whole(data))


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    tails=st.lists(st.integers(1, 70), min_size=5, max_size=5),
    threads=st.integers(1, 3),
)
def test_ragged_batches(lengths: list[int], tails: list[int], threads: int) -> None:
    """Every row of a ragged step is right, and is the row that the sequence alone has."""
    datas = [random_data(TINY, length, seed) for seed, length in enumerate(lengths)]
    rig = Rig(TINY, threads=threads)
    sequences = [rig.sequence(data) for data in datas]
    tails = [min(tail, s.length) for tail, s in zip(tails, sequences, strict=False)]
    if before := [(s, s.length - tail) for s, tail in zip(sequences, tails, strict=True) if s.length > tail]:
        rig.step(before)
    outs = rig.step(list(zip(sequences, tails, strict=True)))
    for data, tail, out in zip(datas, tails, outs, strict=True):
        assert np.array_equal(out, Rig(TINY, seed=2).whole(data)[-tail:])
        assert np.abs(out - reference(data, "float16")[-tail:]).max() < 2e-5


@settings(max_examples=6)
@given(
    group=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    sixteens=st.integers(1, 10),
    page_size=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from(["float16", "float32"]),
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=3),
)
def test_any_shape(
    group: int, kv_heads: int, sixteens: int, page_size: int, dtype: KVDtype, lengths: list[int]
) -> None:
    """Prompts that end anywhere in a page, together, then a row each: right, and the rows of each prompt alone."""
    shape = AttentionShape(group * kv_heads, kv_heads, 16 * sixteens, page_size, dtype)
    datas = [random_data(shape, length + 1, seed) for seed, length in enumerate(lengths)]
    rig = Rig(shape, threads=2)
    sequences = [rig.sequence(data) for data in datas]
    first = rig.step([(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)])
    last = rig.step([(sequence, 1) for sequence in sequences])
    for data, prompt, row in zip(datas, first, last, strict=True):
        found = np.concatenate([prompt, row])
        assert np.array_equal(found, Rig(shape, seed=2).whole(data))
        assert np.abs(found - reference(data, dtype)).max() < 2e-5


@pytest.mark.parametrize("name", ["avx2", "generic"])
def test_every_isa_gives_the_same_bits(name: Literal["avx2", "generic"]) -> None:
    """On a machine with AVX-512 this compares three instruction sets; without AVX2 there is only the generic one."""
    native = detect_isa()
    if native.name == "generic":
        pytest.skip("no AVX2 on this machine")
    shape = AttentionShape(6, 2, 32, 16, "float32")
    data = random_data(shape, 550)
    expected, rig = Rig(shape, isa=native).whole(data), Rig(shape, isa=make_isa(name))
    sequence = rig.sequence(data)
    assert np.array_equal(rig.step([(sequence, 549)])[0], expected[:549])
    assert np.array_equal(rig.step([(sequence, 1)])[0], expected[549:])


def test_extreme_scores() -> None:
    """One key takes all the weight, then the others are far below it: no overflow, no NaN, no denormal weight."""
    q, k, v = random_data(SMOL32, 700)
    data = (q * 100, k * 100, v)
    out = Rig(SMOL32).whole(data)
    assert np.isfinite(out).all()
    assert (
        np.abs(out - reference(data, "float32")).max() < 2e-2
    )  # scores near 1e5: float32 keeps 2**-7 of them
    equal = Rig(SMOL32).whole((np.zeros_like(q), k, v))
    mean = np.cumsum(v.astype("float64"), 0) / np.arange(1, 701)[:, None, None]
    assert np.abs(equal - np.repeat(mean, 3, axis=1)).max() < 2e-6  # no score differs: plain running means


def test_no_tasks_touch_nothing() -> None:
    prefill, decode, _ = compiled(TINY, detect_isa())
    plan = plan_attention(TINY, 2, starts=[], counts=[])
    out = tensor(np.full((3, 4 * 16), 5, "float32"))
    shared = tensor(np.zeros((3, 4, 16), "float32")), Rig(TINY).pool, LAYER, tensor(np.zeros((0, 0), "int32"))
    prefill(*shared, tensor(plan.prefill.tasks), tensor(plan.prefill.thread_tasks), out)
    lists = tensor(plan.decode.tasks), tensor(plan.decode.thread_tasks), tensor(plan.decode.merges)
    decode(*shared, *lists, tensor(np.zeros(plan.decode.workspace, "float32")), out)
    assert (out.numpy() == 5).all()


def test_a_pool_of_more_than_2_to_the_31_elements() -> None:
    """32-bit offsets would wrap. Only the pages in use are touched, so the 4 GiB cost nothing."""
    pages = 2**19 + 64  # two layers of 2**11 elements a page
    layout = KVLayout(LAYERS, TINY.kv_heads, TINY.head_dim, TINY.page_size, TINY.kv_dtype)
    memory = mmap.mmap(-1, layout.bytes_per_page * pages)
    rig = Rig(TINY)
    rig.pool = tvm.runtime.from_dlpack(np.frombuffer(memory, "float16").reshape(layout.shape(pages)))
    rig.free = list(range(pages - 40, pages))
    data = random_data(TINY, 530)
    sequence = rig.sequence(data)
    expected = Rig(TINY).whole(data)
    assert np.array_equal(rig.step([(sequence, 529)])[0], expected[:529])
    assert np.array_equal(rig.step([(sequence, 1)])[0], expected[529:])
