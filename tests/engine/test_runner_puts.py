"""Writing K/V by way of a runner, the compiled one and the fake: puts under leases, copies of slots."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from microserving.engine.fake_runner import FakeRunner
from microserving.engine.model_runner import TVMModelRunner
from microserving.engine.runner import LayerTimes, ModelRunner, RemotePut, RemoteTarget, RunnerChunk
from microserving.engine.tvm_runtime import aligned_bytes
from microserving.errors import InternalError
from microserving.transports import create_transport
from microserving.transports.base import LeaseGuard, RemotePool
from tests.engine.random_weights import (
    QUANTISED,
    RandomWeights,
    layout_of,
    pool_memory,
    small_config,
)
from tests.transports.conformance_harness import RecordingObserver

PAGES, REMOTE_PAGES, SIZE, LAYERS = 24, 17, 16, 3
WEIGHTS = RandomWeights(small_config(tied=True, layers=LAYERS), QUANTISED)
LAYOUT = layout_of(WEIGHTS.config, "float16")
TOKENS = np.random.default_rng(7).integers(0, 100, 200).tolist()
Slots = npt.NDArray[np.int32]
Pool = npt.NDArray[np.uint16]


def bits(memory: npt.NDArray[np.uint8], pages: int) -> Pool:
    """[layers, pages, 2, kv_heads, page_size * head_dim], a view."""
    return memory[: LAYOUT.bytes_per_page * pages].view(np.uint16).reshape(LAYOUT.shape(pages))


@dataclass
class Subject:
    """A runner, its pool, and a hook that is called before each layer's put of ``run``."""

    runner: ModelRunner
    pool: Pool
    hook: Callable[[int], None] = lambda _: None


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiled(cache_dir: Path) -> tuple[TVMModelRunner, Pool]:
    memory = pool_memory(LAYOUT, PAGES)
    runner = TVMModelRunner.create(
        WEIGHTS,
        layout=LAYOUT,
        total_pages=PAGES,
        pool_memory=memory,
        threads=2,
        cache_dir=cache_dir,
    )
    return runner, bits(memory, PAGES)


@pytest.fixture(params=["compiled", "fake"])
def subject(request: pytest.FixtureRequest, compiled: tuple[TVMModelRunner, Pool]) -> Subject:
    if request.param == "fake":
        fake = FakeRunner(LAYOUT, total_pages=PAGES)
        made = Subject(fake, bits(fake.memory, PAGES))
        fake.before_put = lambda layer: made.hook(layer)
        return made
    runner, pool = compiled
    made, layers = Subject(runner, pool), iter(range(1000))

    def listener(kernel: str, about_to_run: bool) -> None:
        if kernel == "put" and about_to_run:
            made.hook(next(layers))

    runner.instrument(listener)
    return made


def remote_pool(**leases: int) -> RemotePool:
    """word_5=77: word 5 holds lease 77. The pool holds the same pattern everywhere."""
    words = aligned_bytes(8 * 16).view(np.int64)
    for name, lease_id in leases.items():
        words[int(name.removeprefix("word_"))] = lease_id
    memory = pool_memory(LAYOUT, REMOTE_PAGES)
    memory[:] = 0xAB
    return RemotePool(memory, REMOTE_PAGES, words)


def slots_at(pages: list[int], first: int, count: int) -> Slots:
    """Slots of positions [first, first + count) of a sequence in ``pages``."""
    position = np.arange(first, first + count)
    return (np.array(pages)[position // SIZE] * SIZE + position % SIZE).astype(np.int32)


def rows(pool: Pool, slots: Slots) -> npt.NDArray[Any]:
    """[layers, slots, 2, kv_heads, head_dim], by the layout's definition (K transposed in its page)."""
    layers, pages, _, heads, size = pool.shape
    k = pool[:, :, 0].reshape(layers, pages, heads, size // SIZE, SIZE)
    v = pool[:, :, 1].reshape(layers, pages, heads, SIZE, size // SIZE)
    found = [np.stack([k[:, s // SIZE, :, :, s % SIZE], v[:, s // SIZE, :, s % SIZE]], axis=1) for s in slots]
    return np.stack(found, axis=1)


def untouched(pool: RemotePool, slots: Slots, layers: slice = slice(None)) -> bool:
    return bool((rows(bits(pool.memory, pool.total_pages), slots)[layers] == 0xABAB).all())


def other_slots(slots: Slots, pages: int) -> Slots:
    return np.setdiff1d(np.arange(pages * SIZE), slots).astype(np.int32)


def fill(subject: Subject, seed: int = 0) -> None:
    subject.pool[...] = np.random.default_rng(seed).integers(0, 2**15, subject.pool.shape, np.uint16)


@pytest.mark.parametrize(("first", "count"), [(0, 48), (3, 11), (0, 1), (5, 80), (0, 0)])
def test_slots_are_copied_inside_the_pool(subject: Subject, first: int, count: int) -> None:
    fill(subject)
    before = subject.pool.copy()
    source = slots_at([20, 3, 7, 9, 11, 13], first, count)
    target = slots_at([2, 22, 4, 8, 16, 10], first + 4, count)
    assert subject.runner.copy_slots(source, target) is None
    if count:
        assert np.array_equal(rows(subject.pool, target), rows(before, source))
    rest = other_slots(target, PAGES)
    assert np.array_equal(rows(subject.pool, rest), rows(before, rest))


@pytest.mark.parametrize("first", [0, 7])
def test_slots_are_copied_into_another_pool(subject: Subject, first: int) -> None:
    fill(subject)
    before, pool = subject.pool.copy(), remote_pool(word_5=77)
    source, target = slots_at([20, 3, 7, 9], 0, 55), slots_at([16, 0, 4, 8], first, 55)
    times = subject.runner.copy_slots(source, target, RemoteTarget(pool, LeaseGuard(5, 77)))
    assert np.array_equal(rows(bits(pool.memory, REMOTE_PAGES), target), rows(before, source))
    assert untouched(pool, other_slots(target, REMOTE_PAGES))
    assert np.array_equal(subject.pool, before)
    assert isinstance(times, LayerTimes)
    stamps = np.stack([times.put_begin, times.put_end], axis=1).reshape(-1)
    assert stamps[0] > 0
    assert (np.diff(stamps) >= 0).all()
    assert np.array_equal(times.layer_end, times.put_end)
    assert times.put_begin.shape == (LAYERS,)


@pytest.mark.case("PD-03")
def test_a_copy_under_a_lease_that_ended_writes_nothing(subject: Subject) -> None:
    slots = slots_at([1, 2], 0, 20)
    for pool in (remote_pool(), remote_pool(word_5=78)):
        assert subject.runner.copy_slots(slots, slots, RemoteTarget(pool, LeaseGuard(5, 77))) is not None
        assert untouched(pool, other_slots(slots[:0], REMOTE_PAGES))


@pytest.mark.case("PD-03")
def test_puts_of_one_step_go_by_their_own_leases_layer_by_layer(subject: Subject) -> None:
    """Three sends to one receiver: the first lease ends before layer 1, the second before layer 2, the third never.

    The wide one makes the step's rows go in parallel.
    """
    pool = remote_pool(word_0=10, word_3=11, word_9=12)
    guards = [LeaseGuard(0, 10), LeaseGuard(3, 11), LeaseGuard(9, 12)]
    pages, there = [[0, 1, 2], [3, 4], [5, 6, 7, 8]], [[9, 3, 5], [16, 0], [7, 11, 2, 13]]
    counts = [40, 20, 60]
    targets = [slots_at(p, 0, n) for p, n in zip(there, counts, strict=True)]
    chunks = [
        RunnerChunk(TOKENS[i : i + n], 0, pages[i], False, RemotePut(pool, targets[i], guards[i]))
        for i, n in enumerate(counts)
    ]

    def end_a_lease(layer: int) -> None:
        if layer > 0:
            pool.leases[guards[layer - 1].word] = 0

    subject.hook = end_a_lease
    subject.runner.run(chunks)
    for index, written in enumerate((1, 2, LAYERS)):
        own = rows(subject.pool, slots_at(pages[index], 0, counts[index]))
        sent = rows(bits(pool.memory, REMOTE_PAGES), targets[index])
        assert np.array_equal(sent[:written], own[:written]), index
        assert untouched(pool, targets[index], slice(written, None)), index
    assert untouched(pool, other_slots(np.concatenate(targets), REMOTE_PAGES))


def test_another_thread_copies_while_a_step_runs(subject: Subject) -> None:
    """In the middle of the step, between two layers; the step's own results are as without it."""
    put = RemotePut(remote_pool(word_1=4), slots_at([0, 1, 2, 3], 0, 60), LeaseGuard(1, 4))
    chunk = RunnerChunk(TOKENS[:60], 0, [20, 21, 22, 23], True, put)
    fill(subject)
    alone = subject.runner.run([chunk]).logits
    before, pool = subject.pool.copy(), remote_pool(word_5=77)
    source, target = slots_at([2, 3, 4], 0, 40), slots_at([9, 8, 7], 6, 40)
    copies: list[LayerTimes | None] = []

    def copy() -> None:
        copies.append(subject.runner.copy_slots(source, target))
        copies.append(subject.runner.copy_slots(source, target, RemoteTarget(pool, LeaseGuard(5, 77))))

    def in_the_middle(_: int) -> None:
        if not copies:
            thread = threading.Thread(target=copy)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()

    subject.hook = in_the_middle
    assert np.array_equal(subject.runner.run([chunk]).logits, alone)
    assert len(copies) == 2
    assert np.array_equal(rows(subject.pool, target), rows(before, source))
    assert np.array_equal(rows(bits(pool.memory, REMOTE_PAGES), target), rows(before, source))


@pytest.mark.case("PD-24")
def test_slots_and_words_that_do_not_exist_never_reach_a_kernel(subject: Subject) -> None:
    pool, good = remote_pool(word_5=77), np.array([3], np.int32)
    for bad in (-1, PAGES * SIZE):
        wrong = np.array([bad], np.int32)
        with pytest.raises(InternalError, match="slot"):
            subject.runner.copy_slots(wrong, good)
        with pytest.raises(InternalError, match="slot"):
            subject.runner.copy_slots(good, wrong)
    outside = np.array([REMOTE_PAGES * SIZE], np.int32)
    with pytest.raises(InternalError, match="slot"):
        subject.runner.copy_slots(good, outside, RemoteTarget(pool, LeaseGuard(5, 77)))
    with pytest.raises(InternalError, match="both source and target"):
        subject.runner.copy_slots(np.array([3, 4], np.int32), np.array([4, 5], np.int32))
    for guard in (LeaseGuard(-1, 77), LeaseGuard(16, 77), LeaseGuard(0, 0)):
        with pytest.raises(InternalError, match="lease word"):
            subject.runner.copy_slots(good, good, RemoteTarget(pool, guard))
        with pytest.raises(InternalError, match="lease word"):
            subject.runner.run([RunnerChunk([1], 0, [0], True, RemotePut(pool, good, guard))])
    assert untouched(pool, other_slots(good[:0], REMOTE_PAGES))


@pytest.mark.case("PD-03")
@pytest.mark.case("PD-40")
@pytest.mark.usefixtures("compiled")  # its code is in the cache by then
@pytest.mark.parametrize("ended", [False, True])
def test_a_sender_that_was_stopped_between_two_layers(ended: bool, cache_dir: Path, tmp_path: Path) -> None:
    """Real processes and the compiled step. ended: the lease ends meanwhile, and its pages get another owner's bytes."""
    observer = RecordingObserver()
    receiver = create_transport("shared_memory", runtime_dir=tmp_path / "run")
    memory = receiver.allocate(LAYOUT.bytes_per_page * 8)
    receiver.serve("d0", "e1", 8, observer)
    script, slots = Path(__file__).with_name("late_writer.py"), np.arange(50, dtype=np.int32)
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    command = [sys.executable, str(script), str(tmp_path / "run"), str(cache_dir)]
    with (
        closing(receiver),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as sender,
    ):
        try:
            stopped = os.waitid(os.P_PID, sender.pid, os.WSTOPPED | os.WEXITED)
            assert stopped is not None
            assert stopped.si_status == signal.SIGSTOP
            put = rows(bits(memory, 8), slots)
            assert [bool(layer.any()) for layer in put] == [True, False, False]
            if ended:
                observer.keep = False
                receiver.revoke(1)
                memory[:] = 0xAB
            sender.send_signal(signal.SIGCONT)
            assert sender.stdout is not None
            assert sender.stdout.read().split() == ["computed", "refused" if ended else "arrived"]
        finally:
            sender.kill()
    put = rows(bits(memory, 8), slots)
    assert (memory == 0xAB).all() if ended else all(layer.any() for layer in put)
    assert observer.events[-1][0] == "end"
