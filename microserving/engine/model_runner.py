"""Computes steps with TVM: the arrays of a step, the compiled step functions, the pool as a tensor.

Owns: packed weights, the rope table, the number of TVM threads. Does not know requests, page bookkeeping or transports.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm_ffi

from microserving.engine.compiler import CodeCache
from microserving.engine.compiler.model import compiled_model
from microserving.engine.kernels.isa import detect_isa
from microserving.engine.kernels.plan import AttentionShape, Planner
from microserving.engine.kernels.transfer import COPY, LAYER_END, PUT_BEGIN, PUT_END, copy_runs
from microserving.engine.models.spec import ModelSpec
from microserving.engine.rope import RopeTable
from microserving.engine.runner import LayerTimes, RemoteTarget, RunnerChunk, StepOutput
from microserving.engine.tensors import Staging, lease_tensor, pool_tensor
from microserving.engine.tvm_runtime import (
    array_of,
    constant,
    empty_array,
    global_function,
    load_objects,
    tensor,
    tensor_of,
    virtual_machine,
)
from microserving.engine.weights import load_weights
from microserving.errors import InternalError, ModelLoadError
from microserving.model_files import ModelConfig, WeightSource, default_cache_dir
from microserving.protocol.kv_layout import KVLayout
from microserving.transports.base import LeaseGuard, RemotePool

Progress = Callable[[str, float], None]
_SPIN_COUNT = "5000"
"""How often an idle worker looks for work before it sleeps: about 4 ms. TVM's default keeps a core busy for 200 ms."""


class TVMModelRunner:
    """A ``ModelRunner``. ``create`` may run on any thread; ``run`` always on the same one, which owns TVM's workers."""

    def __init__(
        self, code: Any, parameters: list[Any], config: ModelConfig, layout: KVLayout, pool: Any, threads: int
    ) -> None:
        self._machine = machine = virtual_machine(code)
        self._step, self._step_put = machine["step"], machine["step_put"]
        self._parameters = tvm_ffi.convert(parameters)  # once: it is a call into C++ for each
        self._config, self._layout, self._pool, self._threads = config, layout, pool, threads
        shape = AttentionShape(
            config.num_heads, layout.kv_heads, layout.head_dim, layout.page_size, layout.dtype
        )
        self._planner = Planner(shape, threads)
        self._workspace = tensor_of(empty_array((1, shape.group, shape.state_width), np.float32))
        self._rope = RopeTable(layout.head_dim, config.rope_theta)
        self._staging = Staging()
        self._copy = code.get_function(
            COPY, query_imports=True
        )  # not by way of the machine, which runs one call at a time
        self._always = [tensor(np.array(words, np.int64)) for words in ([0, 1], [1])]
        self._no_times = tensor(np.zeros((layout.layers, 3), np.int64))
        self._thread: int | None = None

    @classmethod
    def create(
        cls,
        weights: WeightSource,
        *,
        layout: KVLayout,
        total_pages: int,
        pool_memory: npt.NDArray[np.uint8],
        threads: int,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
        cache: CodeCache | None = None,
    ) -> TVMModelRunner:
        """Get the packed weights and the code, wrap the pool. TVM's compiler is imported only for what is not cached.

        pool_memory: uint8 [>= layout.bytes_per_page * total_pages], 64-byte aligned and writable; used in place.
        progress(stage, fraction): stages "weights", "compile" (only when not cached) and "load".
        Raises ModelLoadError for a model that the kernels cannot run, ConfigError for a K/V dtype that this CPU lacks.
        """
        report = progress or (lambda _stage, _fraction: None)
        config = weights.config
        _check_shapes(config, layout)
        isa = detect_isa()
        isa.check_kv_dtype(layout.dtype)
        directory = cache_dir or default_cache_dir()
        arrays = dict(load_weights(weights, directory, threads, report))
        kinds = {name: packed.kind for name, packed in arrays.items() if packed.kind is not None}
        spec = ModelSpec(config, layout, isa, kinds)
        names, *objects = compiled_model(spec, cache or CodeCache(directory), report)
        report("load", 0.0)
        parameters = [constant(arrays.pop(name).array) for name in names.decode().split("\n")]
        pool = pool_tensor(pool_memory, layout, total_pages)
        runner = cls(load_objects(tuple(objects)), parameters, config, layout, pool, threads)
        report("load", 1.0)
        return runner

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def max_context(self) -> int:
        return self._config.max_context

    @property
    def page_size(self) -> int:
        return self._layout.page_size

    @property
    def total_pages(self) -> int:
        return int(self._pool.shape[1])

    @property
    def kv_bytes_per_token(self) -> int:
        return self._layout.bytes_per_token

    @property
    def pool_array(self) -> npt.NDArray[Any]:
        """The pool as numpy sees it (``KVLayout.shape``), sharing its memory; for tests and debugging."""
        return np.from_dlpack(self._pool)

    def instrument(self, listener: Callable[[str, bool], None]) -> None:
        """From now on call listener(kernel's name, whether it is about to run) around every call in a step: for profiles."""
        self._machine["set_instrument"](lambda _function, name, before, *_rest: listener(name, before))

    def run(self, chunks: Sequence[RunnerChunk]) -> StepOutput:
        self._own_thread()
        arguments = self._arguments(chunks)
        puts = [chunk.put for chunk in chunks if chunk.put is not None]
        if not puts:
            return StepOutput(array_of(self._step(*arguments, self._parameters)), None)
        remote = self._remote_arguments(chunks, puts[0].pool)
        logits, times = self._step_put(*arguments, *remote, self._parameters)
        stamps = array_of(times)
        return StepOutput(
            array_of(logits), LayerTimes(stamps[:, PUT_BEGIN], stamps[:, PUT_END], stamps[:, LAYER_END])
        )

    def copy_slots(
        self,
        source: npt.NDArray[np.int32],
        target: npt.NDArray[np.int32],
        remote: RemoteTarget | None = None,
    ) -> LayerTimes | None:
        page_size = self._layout.page_size
        pages = self.total_pages if remote is None else remote.pool.total_pages
        _check_range("slot of a copy", source, self.total_pages * page_size)
        _check_range("slot of a copy", target, pages * page_size)
        runs = tensor(copy_runs(source, target, page_size))
        if remote is None:
            if np.isin(target, source).any():
                raise InternalError("a slot is both source and target of a copy")
            guard, leases = self._always
            self._copy(runs, guard, self._pool, self._pool, leases, self._no_times)
            return None
        times = tensor(np.zeros((self._layout.layers, 3), np.int64))
        guard = tensor(np.array(_guard_row(remote.guard, remote.pool), np.int64))
        into = pool_tensor(remote.pool.memory, self._layout, remote.pool.total_pages)
        self._copy(runs, guard, self._pool, into, lease_tensor(remote.pool.leases), times)
        stamps = array_of(times)
        return LayerTimes(stamps[:, PUT_BEGIN], stamps[:, PUT_END], stamps[:, PUT_END])

    def _arguments(self, chunks: Sequence[RunnerChunk]) -> list[Any]:
        """The inputs of ``step`` in the order of ``models.base.step_signature``."""
        starts, counts = [chunk.start for chunk in chunks], [len(chunk.token_ids) for chunk in chunks]
        plan = self._planner.plan(starts, counts)
        table = self._page_table(chunks)
        ids, positions, slots = _rows(chunks, table, self._layout.page_size)
        ends = list(itertools.accumulate(counts))
        wanted = [
            row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.logits, end)
        ]
        inputs = [
            ids,
            self._rope.rows(positions),
            slots,
            table,
            plan.prefill.tasks,
            plan.prefill.thread_tasks,
            plan.decode.tasks,
            plan.decode.thread_tasks,
            plan.decode.merges,
            np.array(wanted, np.int32),
        ]
        *placed, logit_rows = self._staging.place(inputs)
        if plan.decode.workspace[0] > self._workspace.shape[0]:
            self._workspace = tensor_of(empty_array(plan.decode.workspace, np.float32))
        return [*placed, self._workspace, logit_rows, self._pool]

    def _page_table(self, chunks: Sequence[RunnerChunk]) -> npt.NDArray[np.int32]:
        """int32 [chunks, most pages]; entries behind a sequence's last page are 0 and never read."""
        used = [-(-(chunk.start + len(chunk.token_ids)) // self._layout.page_size) for chunk in chunks]
        table = np.zeros((len(chunks), max(used)), np.int32)
        for row, (chunk, pages) in enumerate(zip(chunks, used, strict=True)):
            table[row, :pages] = chunk.pages[:pages]
        _check_range("page", table, self.total_pages)
        return table

    def _remote_arguments(self, chunks: Sequence[RunnerChunk], pool: RemotePool) -> list[Any]:
        """What ``step_put`` takes besides: the fields of ``models.base.RemoteInputs``. Rows that are not sent: slot -1."""
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        slots, guards = np.full(rows, -1, np.int32), np.zeros((rows, 2), np.int64)
        end = 0
        for chunk in chunks:
            begin, end = end, end + len(chunk.token_ids)
            if chunk.put is not None:
                slots[begin:end] = chunk.put.slots
                guards[begin:end] = _guard_row(chunk.put.guard, pool)
        _check_range("remote slot", slots, pool.total_pages * self._layout.page_size, lowest=-1)
        times = np.zeros((self._layout.layers, 3), np.int64)
        remote = pool_tensor(pool.memory, self._layout, pool.total_pages)
        made = [tensor(array) for array in (slots, guards)]
        return [remote, *made, lease_tensor(pool.leases), tensor(times)]

    def _own_thread(self) -> None:
        """TVM's worker pool belongs to the calling thread: set its size before its first use there."""
        current = threading.get_ident()
        if self._thread != current:
            set_tvm_threads(self._threads)
            self._thread = current


def set_tvm_threads(threads: int) -> None:
    """Let kernels called from this thread use ``threads`` cores. Works until the thread's first parallel kernel.

    TVM reads the environment when it makes the workers of a thread.
    """
    os.environ["TVM_NUM_THREADS"] = str(threads)
    os.environ["TVM_BIND_THREADS"] = "0"  # two engines on a host must not be pinned to the same core
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", _SPIN_COUNT)
    global_function("runtime.config_threadpool")(1, threads)


def _check_shapes(config: ModelConfig, layout: KVLayout) -> None:
    found = (layout.layers, layout.kv_heads, layout.head_dim)
    if found != (config.num_layers, config.num_kv_heads, config.head_dim):
        raise ModelLoadError(f"the KV layout {found} is not that of the model")
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % 16:
            raise ModelLoadError(f"{name} is {getattr(config, name)}; the kernels need a multiple of 16")


def _rows(
    chunks: Sequence[RunnerChunk], table: npt.NDArray[np.int32], page_size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The token ids, positions and slots of all rows, int32 [n] each."""
    ids = np.array([token for chunk in chunks for token in chunk.token_ids], np.int32)
    if len(ids) == len(chunks):  # decodes
        positions = np.array([chunk.start for chunk in chunks], np.int32)
        sequence = np.arange(len(chunks))
    else:
        runs = [range(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]
        positions = np.concatenate([np.arange(run.start, run.stop, dtype=np.int32) for run in runs])
        sequence = np.repeat(np.arange(len(chunks)), [len(run) for run in runs])
    pages, offsets = np.divmod(positions, np.int32(page_size))
    return ids, positions, table[sequence, pages] * np.int32(page_size) + offsets


def _check_range(what: str, numbers: npt.NDArray[np.int32], end: int, lowest: int = 0) -> None:
    """Kernels write where these numbers say: one that is wrong must not reach them."""
    if numbers.size and (numbers.min() < lowest or numbers.max() >= end):
        raise InternalError(f"a {what} is outside [{lowest}, {end})")


def _guard_row(guard: LeaseGuard, pool: RemotePool) -> tuple[int, int]:
    """(GUARD_WORD, GUARD_ID). A word that the pool does not have must not reach a kernel; id 0 is no lease's."""
    if not 0 <= guard.word < len(pool.leases) or guard.lease_id < 1:
        raise InternalError("a put has no lease word")
    return guard.word, guard.lease_id
