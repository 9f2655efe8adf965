"""The logits of a position are the same bits however they are come by: the model as a whole, cut and mixed at random.

Fixed cases, threads, instruction sets and the numpy reference: ``test_model_runner``, ``test_int8``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.engine.model_runner import TVMModelRunner
from microserving.engine.runner import RunnerChunk
from microserving.protocol.kv_layout import Activations, KVLayout
from tests.engine.random_weights import QUANTISED, RandomWeights, layout_of, pool_memory, small_config
from tests.reference.llama_numpy import ReferenceLlama

PAGE, PAGES, LONGEST = 16, 260, 150
WEIGHTS = RandomWeights(small_config(tied=True, layers=1), QUANTISED)
LIMIT = WEIGHTS.config.max_context
TOKENS = np.random.default_rng(11).integers(0, 100, LIMIT).tolist()
ALONE = list(range(PAGES - LIMIT // PAGE, PAGES))  # the pages of what is compared with
FREE = PAGES - len(ALONE)


@pytest.fixture(scope="module", params=["float32", "int8"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TVMModelRunner:
    activations: Activations = request.param
    plain = layout_of(WEIGHTS.config, "float32")
    layout = KVLayout(
        plain.layers, plain.kv_heads, plain.head_dim, plain.page_size, plain.dtype, activations=activations
    )
    return TVMModelRunner.create(
        WEIGHTS,
        layout=layout,
        total_pages=PAGES,
        pool_memory=pool_memory(layout, PAGES),
        threads=2,
        cache_dir=tmp_path_factory.mktemp("cache"),
    )


@functools.cache
def expected(runner: TVMModelRunner, first: int, length: int) -> np.ndarray:
    """The last logits of TOKENS[first:first + length] in one prefill, alone."""
    out = runner.run([RunnerChunk(TOKENS[first : first + length], 0, ALONE, True)])
    return np.array(out.logits[0])


def pages_for(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Pages of each length, taken from ``order``, none twice."""
    left = iter(order)
    return [[next(left) for _ in range(-(-length // PAGE))] for length in lengths]


@settings(max_examples=12)
@given(data=st.data(), mates=st.integers(2, 16))
def test_random_mates(runner: TVMModelRunner, data: st.DataObject, mates: int) -> None:
    """A step of 2 to 16 sequences: whole prompts, ends of prompts and decodes in any order, on any pages."""
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=mates, max_size=mates))
    tails = [data.draw(st.one_of(st.just(1), st.integers(1, length))) for length in lengths]
    owned = pages_for(data.draw(st.permutations(range(FREE))), lengths)
    before = [
        RunnerChunk(TOKENS[row : row + length - tail], 0, pages, False)
        for row, (length, tail, pages) in enumerate(zip(lengths, tails, owned, strict=True))
        if length > tail
    ]
    if before:
        runner.run(before)
    step = [
        RunnerChunk(TOKENS[row + length - tail : row + length], length - tail, pages, True)
        for row, (length, tail, pages) in enumerate(zip(lengths, tails, owned, strict=True))
    ]
    for row, (logits, length) in enumerate(zip(runner.run(step).logits, lengths, strict=True)):
        assert np.array_equal(logits, expected(runner, row, length)), (row, length)


@settings(max_examples=12)
@given(cuts=st.sets(st.integers(1, LONGEST - 1), max_size=8), order=st.permutations(range(FREE)))
def test_any_chunking_on_any_pages(runner: TVMModelRunner, cuts: set[int], order: list[int]) -> None:
    for begin, end in itertools.pairwise([0, *sorted(cuts), LONGEST]):
        out = runner.run([RunnerChunk(TOKENS[begin:end], begin, order, True)])
        assert np.array_equal(out.logits[0], expected(runner, 0, end))


@settings(max_examples=12)
@given(shared=st.integers(1, LONGEST - 1), more=st.integers(1, 60), order=st.permutations(range(FREE)))
def test_a_prefix_forked_at_any_position(
    runner: TVMModelRunner, shared: int, more: int, order: list[int]
) -> None:
    """Whole pages are shared, the rest of the prefix is copied; the copy's source goes on with other tokens."""
    runner.run([RunnerChunk(TOKENS[:shared], 0, order[:20], False)])
    whole, part = divmod(shared, PAGE)
    fork = [*order[:whole], *order[20:40]]
    if part:
        offsets = np.arange(part, dtype=np.int32)
        runner.copy_slots(order[whole] * PAGE + offsets, fork[whole] * PAGE + offsets, None)
    runner.run([RunnerChunk(TOKENS[500:540], shared, order[:20], False)])
    out = runner.run([RunnerChunk(TOKENS[shared : shared + more], shared, fork, True)])
    assert np.array_equal(out.logits[0], expected(runner, 0, shared + more))


def test_a_context_at_the_limit(runner: TVMModelRunner) -> None:
    """The last position that there is: as a decode, as the end of a prefill, and by numpy (for exact activations)."""
    pages = list(range(LIMIT // PAGE))
    runner.run([RunnerChunk(TOKENS[: LIMIT - 1], 0, pages, False)])
    decoded = runner.run([RunnerChunk(TOKENS[LIMIT - 1 :], LIMIT - 1, pages, True)]).logits[0]
    assert np.array_equal(decoded, expected(runner, 0, LIMIT))
    exact = ReferenceLlama(WEIGHTS, dtype=np.float64).logits(TOKENS)[-1]
    bound = 2e-5 if runner._layout.activations == "float32" else 0.1
    assert np.abs(decoded - exact).max() < bound
