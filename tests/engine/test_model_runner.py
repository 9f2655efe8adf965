"""The whole model against an independent numpy forward, and its bits over every way to cut the same work.

Pools are filled with NaN, so that a read of a slot that was never written shows.
"""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from microserving.engine.compiler import CodeCache
from microserving.engine.model_runner import TVMModelRunner
from microserving.engine.runner import RemotePut, RunnerChunk
from microserving.engine.tvm_runtime import aligned_bytes
from microserving.errors import ConfigError, InternalError, ModelLoadError
from microserving.protocol.kv_layout import KVDtype
from microserving.transports.base import LeaseGuard, RemotePool
from tests.engine.random_weights import (
    DENSE,
    QUANTISED,
    RandomWeights,
    layout_of,
    pool_memory,
    small_config,
)
from tests.reference.llama_numpy import ReferenceLlama

PAGES = 64
TIED = RandomWeights(small_config(tied=True), QUANTISED)
UNTIED = RandomWeights(small_config(tied=False), DENSE)
MODELS: dict[str, tuple[RandomWeights, KVDtype]] = {"tied": (TIED, "float16"), "untied": (UNTIED, "float32")}
TOKENS = np.random.default_rng(7).integers(0, 100, 600).tolist()


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def make(
    name: str,
    cache_dir: Path,
    *,
    threads: int = 2,
    pages: int = PAGES,
    cache: CodeCache | None = None,
    kv_dtype: KVDtype | None = None,
) -> TVMModelRunner:
    weights, dtype = MODELS[name]
    layout = layout_of(weights.config, kv_dtype or dtype)
    return TVMModelRunner.create(
        weights,
        layout=layout,
        total_pages=pages,
        pool_memory=pool_memory(layout, pages),
        threads=threads,
        cache_dir=cache_dir,
        cache=cache,
    )


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def runner(name: str, cache_dir: Path) -> TVMModelRunner:
    return make(name, cache_dir)


def pages_of(seed: int, count: int = 40) -> list[int]:
    return np.random.default_rng(seed).permutation(PAGES)[:count].tolist()


def prefill(
    runner: TVMModelRunner, tokens: Sequence[int], pages: Sequence[int], cuts: Sequence[int] = ()
) -> np.ndarray:
    """The logits of the last token; ``cuts``: where a new step begins."""
    edges = [0, *cuts, len(tokens)]
    for begin, end in itertools.pairwise(edges):
        out = runner.run([RunnerChunk(tokens[begin:end], begin, pages, True)])
    return out.logits[0]


@pytest.fixture(scope="module")
def expected(runner: TVMModelRunner) -> dict[int, np.ndarray]:
    """Prompt length -> logits of TOKENS[:length] in one prefill."""
    return {n: prefill(runner, TOKENS[:n], pages_of(0)) for n in (1, 2, 15, 16, 17, 64, 65, 130, 530)}


def test_against_an_independent_forward(
    name: str, runner: TVMModelRunner, expected: dict[int, np.ndarray]
) -> None:
    weights, dtype = MODELS[name]
    reference = ReferenceLlama(weights, dtype=np.float64, kv_dtype=dtype).logits(TOKENS[:530])
    for length, logits in expected.items():
        np.testing.assert_allclose(logits, reference[length - 1], atol=2e-3 if dtype == "float16" else 2e-5)


@pytest.mark.parametrize(
    "cuts", [(1,), (129,), (16, 32, 33), (64, 65, 66, 67, 128), tuple(range(100, 130))], ids=str
)
def test_chunking_changes_no_bit(
    runner: TVMModelRunner, expected: dict[int, np.ndarray], cuts: tuple[int, ...]
) -> None:
    assert np.array_equal(prefill(runner, TOKENS[:130], pages_of(1), cuts), expected[130])


def test_decode_rows_equal_prefill_rows(runner: TVMModelRunner, expected: dict[int, np.ndarray]) -> None:
    """530 tokens cross a span edge (512); only the last steps are decodes, so that the test stays short."""
    cuts = [1, *range(500, 530)]
    assert np.array_equal(prefill(runner, TOKENS[:530], pages_of(2), cuts), expected[530])
    assert np.array_equal(prefill(runner, TOKENS[:17], pages_of(2), range(1, 17)), expected[17])


def test_batch_mates_change_no_bit(runner: TVMModelRunner, expected: dict[int, np.ndarray]) -> None:
    """One step with decodes and prefill chunks of several sequences, in an order that mixes them."""
    lengths = [65, 1, 17, 130, 2, 64]
    pages = iter(pages_of(3, PAGES))
    owned = {n: [next(pages) for _ in range(-(-n // 16))] for n in lengths}
    done = {n: n - 1 if n in (65, 17) else n // 2 for n in lengths}
    first = [RunnerChunk(TOKENS[: done[n]], 0, owned[n], False) for n in lengths if done[n]]
    assert runner.run(first).logits.shape == (0, runner.vocab_size)
    last = [RunnerChunk(TOKENS[done[n] : n], done[n], owned[n], n != 2) for n in lengths]
    logits = runner.run(last).logits
    for row, length in zip(logits, [n for n in lengths if n != 2], strict=True):
        assert np.array_equal(row, expected[length]), length


def test_page_placement_changes_no_bit(runner: TVMModelRunner, expected: dict[int, np.ndarray]) -> None:
    for seed in (4, 5):
        assert np.array_equal(prefill(runner, TOKENS[:530], pages_of(seed)), expected[530])


def test_threads_change_no_bit(name: str, cache_dir: Path, expected: dict[int, np.ndarray]) -> None:
    found = []

    def run() -> None:  # a thread of its own: TVM's workers belong to the calling thread
        alone = make(name, cache_dir, threads=1)
        found.append(prefill(alone, TOKENS[:530], pages_of(6), [300]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert np.array_equal(found[0], expected[530])


def test_another_instruction_set_changes_no_bit(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for baseline x86-64 (or ARM) blocks registers differently and may lack an FMA: only speed differs."""
    best = make("tied", cache_dir, kv_dtype="float32")
    monkeypatch.setenv("MICROSERVING_ISA", "generic")
    generic = make("tied", cache_dir, kv_dtype="float32")
    for length in (1, 17, 130):
        cuts = [1] if length > 1 else []
        tokens, pages = TOKENS[:length], pages_of(7)
        assert np.array_equal(prefill(generic, tokens, pages, cuts), prefill(best, tokens, pages))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ARM's base set converts halves")
def test_a_kv_dtype_that_the_cpu_lacks_is_refused(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICROSERVING_ISA", "generic")
    with pytest.raises(ConfigError, match="use float32"):
        make("tied", cache_dir, kv_dtype="float16")


def test_a_put_leaves_the_same_bits_in_the_other_pool(
    name: str, runner: TVMModelRunner, expected: dict[int, np.ndarray]
) -> None:
    weights, dtype = MODELS[name]
    layout, remote_pages, length = layout_of(weights.config, dtype), 23, 130
    memory = pool_memory(layout, remote_pages)
    order = np.random.default_rng(8).permutation(remote_pages)
    position = np.arange(length)
    slots = (order[position // 16] * 16 + position % 16).astype(np.int32)
    slots[40:50] = -1
    pages, remote = pages_of(9), RemotePool(memory, remote_pages, lease_words(5, 77))
    runner.run([RunnerChunk(TOKENS[:64], 0, pages, False, RemotePut(remote, slots[:64], LeaseGuard(5, 77)))])
    mate = RunnerChunk(TOKENS[:30], 0, pages_of(9, PAGES)[40:], False)
    out = runner.run(
        [
            mate,
            RunnerChunk(TOKENS[64:length], 64, pages, True, RemotePut(remote, slots[64:], LeaseGuard(5, 77))),
        ]
    )
    assert np.array_equal(out.logits[0], expected[length])

    local_slots = np.array(pages)[position // 16] * 16 + position % 16
    local = _rows(runner.pool_array, local_slots)
    sent = _rows(memory.view(dtype).reshape(layout.shape(remote_pages)), slots)
    kept = slots >= 0
    assert np.array_equal(sent[:, kept], local[:, kept])
    unsent = np.setdiff1d(np.arange(remote_pages * 16), slots)
    assert np.isnan(_rows(memory.view(dtype).reshape(layout.shape(remote_pages)), unsent)).all()

    times = out.layer_times
    assert times is not None
    assert (times.put_begin <= times.put_end).all()
    assert (times.put_end < times.layer_end).all()
    assert (times.layer_end[:-1] < times.put_begin[1:]).all()


def lease_words(word: int, lease_id: int) -> npt.NDArray[np.int64]:
    """Lease words of which one holds a lease."""
    words = aligned_bytes(8 * 16).view(np.int64)
    words[word] = lease_id
    return words


def _rows(pool: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """[layers, slots, 2, kv_heads, head_dim] of a pool, by the layout's definition (K transposed in its page)."""
    layers, pages, _, heads, size = pool.shape
    k = pool[:, :, 0].reshape(layers, pages, heads, size // 16, 16)
    v = pool[:, :, 1].reshape(layers, pages, heads, 16, size // 16)
    page, offset = slots // 16, slots % 16
    parts = [(k[:, p, :, :, o], v[:, p, :, o]) for p, o in zip(page, offset, strict=True)]
    return np.stack([np.stack(part, axis=1) for part in parts], axis=1)


def test_a_second_runner_does_not_compile(cache_dir: Path) -> None:
    make("tied", cache_dir)
    again = CodeCache(cache_dir)
    make("tied", cache_dir, cache=again)
    assert again.builds == 0


def test_a_corrupt_cache_entry_is_rebuilt(cache_dir: Path) -> None:
    make("tied", cache_dir)
    for file in (cache_dir / "code").glob("*.bin"):
        file.write_bytes(file.read_bytes()[:1000])
    again = CodeCache(cache_dir)
    fresh = make("tied", cache_dir, cache=again)
    assert again.builds == 1
    assert fresh.run([RunnerChunk([1, 2], 0, [0], True)]).logits.shape == (1, 100)


def test_properties(name: str, runner: TVMModelRunner) -> None:
    assert (runner.vocab_size, runner.max_context, runner.page_size, runner.total_pages) == (
        100,
        2048,
        16,
        PAGES,
    )
    assert runner.kv_bytes_per_token == 2 * 2 * 2 * 16 * (2 if name == "tied" else 4)


def test_progress_names_the_stages(cache_dir: Path) -> None:
    make("tied", cache_dir)
    layout, seen = layout_of(TIED.config, "float16"), []
    TVMModelRunner.create(
        TIED,
        layout=layout,
        total_pages=4,
        pool_memory=pool_memory(layout, 4),
        threads=1,
        cache_dir=cache_dir,
        progress=lambda stage, fraction: seen.append((stage, fraction)),
    )
    assert [stage for stage, fraction in seen if fraction == 1.0] == ["weights", "load"]
    assert all(0.0 <= fraction <= 1.0 for _, fraction in seen)


def test_what_the_kernels_cannot_run_is_refused_before_anything_is_packed(tmp_path: Path) -> None:
    layout = layout_of(small_config(tied=True, layers=3), "float16")
    with pytest.raises(ModelLoadError, match="KV layout"):
        TVMModelRunner.create(
            TIED,
            layout=layout,
            total_pages=4,
            pool_memory=pool_memory(layout, 4),
            threads=1,
            cache_dir=tmp_path,
        )


def test_pool_memory_must_fit_and_be_aligned(cache_dir: Path) -> None:
    layout = layout_of(TIED.config, "float16")
    memory = pool_memory(layout, 5)
    for bad in (memory[: layout.bytes_per_page * 4 - 1], memory[8:]):
        with pytest.raises(ValueError, match="pool memory"):
            TVMModelRunner.create(
                TIED, layout=layout, total_pages=4, pool_memory=bad, threads=1, cache_dir=cache_dir
            )


def test_a_page_or_slot_outside_its_pool_never_reaches_a_kernel(runner: TVMModelRunner, name: str) -> None:
    for pages in ([PAGES], [-1]):
        with pytest.raises(InternalError, match="page"):
            runner.run([RunnerChunk([1], 0, pages, True)])
    layout = layout_of(MODELS[name][0].config, MODELS[name][1])
    remote = RemotePool(pool_memory(layout, 2), 2, lease_words(5, 77))
    for slot in (32, -2):
        put = RemotePut(remote, np.array([slot], np.int32), LeaseGuard(5, 77))
        with pytest.raises(InternalError, match="remote slot"):
            runner.run([RunnerChunk([1], 0, [0], True, put)])


def test_an_idle_worker_sleeps(runner: TVMModelRunner) -> None:
    """The process uses almost no CPU time after a step: a spinning worker would take a core from the other engine."""
    runner.run([RunnerChunk(TOKENS[:64], 0, pages_of(0), True)])
    before = time.process_time()
    threading.Event().wait(0.3)
    assert time.process_time() - before < 0.1


def test_memory_does_not_grow_with_the_lengths_of_steps(runner: TVMModelRunner) -> None:
    """An allocator that keeps what it freed keeps it for each length: about 60 MB here, gigabytes for a real model."""
    pages = pages_of(0)
    runner.run([RunnerChunk(TOKENS, 0, pages, True)])
    before = _own_memory()
    for length in range(200, 600, 8):
        runner.run([RunnerChunk(TOKENS[:length], 0, pages, True)])
    assert _own_memory() - before < 16 * 2**20


def _own_memory() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon:")).split()[1]) * 1024


def test_importing_the_registry_does_not_import_tvm() -> None:
    code = "import sys, microserving.engine.models.registry; sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
