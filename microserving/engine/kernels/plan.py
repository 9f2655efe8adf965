"""Which rows attention computes where: task lists made on the host once per step and shared by all layers.

Owns: the shape that attention kernels are made for, and the columns of the task arrays that the kernels read. Pure numpy;
knows neither TVM nor requests. Any assignment of tasks to threads gives the same bits: only the time differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from microserving.protocol.kv_layout import KVDtype

KEY_BLOCK = 64
"""Keys of one online-softmax step. Blocks are cut at absolute positions: part of what decides the bits."""
KEY_SPAN = 512
"""Keys of one fresh softmax state; spans are merged left to right. Cut at absolute positions, as blocks are."""
TASK_FIELDS = 6
_TILE_ROWS = (
    96  # rows (queries x heads of a group) that share one widened K/V block: 24 KiB of q at head_dim 64
)

Ints = Sequence[int] | npt.NDArray[np.signedinteger]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention kernel is compiled for.

    Raises ValueError where the kernels have no code: head_dim not a multiple of 16, a page size other than 16, 32 or 64,
    num_heads not a multiple of kv_heads.
    """

    num_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: KVDtype

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not group over {self.kv_heads} K/V heads")
        if self.head_dim < 16 or self.head_dim % 16:
            raise ValueError(f"head_dim {self.head_dim} is not a multiple of 16")
        if self.page_size not in (16, 32, 64):
            raise ValueError(f"page size {self.page_size} is none of 16, 32, 64")
        if self.kv_dtype not in ("float16", "float32"):
            raise ValueError(f"K/V dtype {self.kv_dtype} is neither float16 nor float32")

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.num_heads // self.kv_heads

    @property
    def state_width(self) -> int:
        """float32 of one row's softmax state: output, 16 lanes of the sum, the maximum, 15 unused."""
        return self.head_dim + 32

    @property
    def query_tile(self) -> int:
        """Query positions of one prefill task."""
        return max(4, _TILE_ROWS // self.group)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """tasks: int32 [n, 6] = (page table row, first q row, q rows, position of the first, K/V head, 0).

    thread_tasks: int32 [threads + 1]; thread t does tasks[thread_tasks[t]:thread_tasks[t + 1]].
    """

    tasks: Int32Array
    thread_tasks: Int32Array


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """tasks: int32 [n, 6] = (page table row, q row, span, position, K/V head, workspace slot or -1: the only span).

    thread_tasks: as in PrefillPlan. merges: int32 [m, 4] = (q row, K/V head, first workspace slot, spans).
    workspace: float32 shape that the kernel needs, [slots, group, head_dim + 32]; at least one slot.
    """

    tasks: Int32Array
    thread_tasks: Int32Array
    merges: Int32Array
    workspace: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A whole step: the prefill kernel creates the output, then the decode kernel writes its rows of it."""

    prefill: PrefillPlan
    decode: DecodePlan


def plan_attention(shape: AttentionShape, threads: int, *, starts: Ints, counts: Ints) -> AttentionPlan:
    """Plan a step whose q rows are its chunks one after the other.

    Chunk i has counts[i] >= 1 rows at positions starts[i], starts[i] + 1, ... and row i of the page table. Chunks of one
    row are planned as decodes, whatever they are: the bits are the same and short rows are cheaper there.
    """
    start, count = np.asarray(starts, np.int32), np.asarray(counts, np.int32)
    row = (np.cumsum(count) - count).astype(np.int32)
    long, short = np.flatnonzero(count > 1), np.flatnonzero(count == 1)
    return AttentionPlan(
        plan_prefill(shape, threads, sequences=long, rows=row[long], starts=start[long], counts=count[long]),
        plan_decode(shape, threads, sequences=short, rows=row[short], positions=start[short]),
    )


class Planner:
    """Plans the steps of one engine, of which most are decodes that differ from the step before by a position per row.

    Which tasks there are, and who does them, is kept while no row of such a step enters another key block; only their
    positions are written anew. Use from one thread.
    """

    def __init__(self, shape: AttentionShape, threads: int) -> None:
        self._shape, self._threads = shape, threads
        self._blocks: list[int] = []  # the key block of each row of the kept plan
        self._kept: AttentionPlan | None = None

    def plan(self, starts: Sequence[int], counts: Sequence[int]) -> AttentionPlan:
        """As ``plan_attention``, up to the dealing of decodes to threads; valid until the next call."""
        if max(counts, default=0) != 1:
            return plan_attention(self._shape, self._threads, starts=starts, counts=counts)
        blocks = [start // KEY_BLOCK for start in starts]
        if self._kept is None or blocks != self._blocks:
            self._kept = plan_attention(self._shape, self._threads, starts=starts, counts=counts)
            self._blocks = blocks
        else:
            tasks = self._kept.decode.tasks
            tasks[:, 3] = starts[0] if len(starts) == 1 else np.array(starts, np.int32)[tasks[:, 0]]
        return self._kept


def plan_prefill(
    shape: AttentionShape, threads: int, *, sequences: Ints, rows: Ints, starts: Ints, counts: Ints
) -> PrefillPlan:
    """Chunk i: counts[i] rows of q from rows[i] on, at positions from starts[i] on, of page table row sequences[i]."""
    sequence, row, start, count = (np.asarray(x, np.int32) for x in (sequences, rows, starts, counts))
    if not len(sequence):
        return PrefillPlan(*_no_tasks(threads))
    tile = shape.query_tile
    chunk, index = _expand(-(-count // tile))
    first = index * tile
    size = np.minimum(tile, count[chunk] - first)
    position = start[chunk] + first
    tasks = _per_head([sequence[chunk], row[chunk] + first, size, position], shape.kv_heads)
    costs = np.repeat((position + size) * (size + 4), shape.kv_heads)  # + 4: widening a block, in rows
    return PrefillPlan(*_balance(tasks, costs, threads))


def plan_decode(
    shape: AttentionShape, threads: int, *, sequences: Ints, rows: Ints, positions: Ints
) -> DecodePlan:
    """Row i: rows[i] of q at position positions[i], which sees the keys 0 .. positions[i] of page table row sequences[i]."""
    sequence, row, position = (np.asarray(x, np.int32) for x in (sequences, rows, positions))
    if not len(sequence):
        workspace = (1, shape.group, shape.state_width)
        return DecodePlan(*_no_tasks(threads), np.empty((0, 4), np.int32), workspace)
    heads = shape.kv_heads
    spans = position // KEY_SPAN + 1
    kept = np.repeat(np.where(spans > 1, spans, 0), heads)  # workspace slots of each (row, head)
    slot = (np.cumsum(kept) - kept).reshape(-1, heads)
    owner, span = _expand(spans)
    tasks = _per_head([sequence[owner], row[owner], span, position[owner]], heads)
    tasks[:, 5] = np.where(spans[owner, None] > 1, slot[owner] + span[:, None], -1).reshape(-1)
    costs = np.repeat(
        np.minimum(KEY_SPAN, position[owner] + 1 - span * KEY_SPAN) + 20, heads
    )  # + 20: a task's start
    several = np.flatnonzero(spans > 1)
    merges = np.empty((len(several) * heads, 4), np.int32)
    merges[:, 0] = np.repeat(row[several], heads)
    merges[:, 1] = np.tile(np.arange(heads), len(several))
    merges[:, 2] = slot[several].reshape(-1)
    merges[:, 3] = np.repeat(spans[several], heads)
    workspace = (max(1, int(kept.sum())), shape.group, shape.state_width)
    return DecodePlan(*_balance(tasks, costs, threads), merges, workspace)


def _no_tasks(threads: int) -> tuple[Int32Array, Int32Array]:
    """An empty list for each thread: most steps have only prefills or only decodes."""
    return np.empty((0, TASK_FIELDS), np.int32), np.zeros(threads + 1, np.int32)


def _expand(parts: Int32Array) -> tuple[npt.NDArray[np.intp], Int32Array]:
    """(owner, index) of every part: parts [2, 3] -> owners [0, 0, 1, 1, 1], indices [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(parts)), parts)
    first = np.cumsum(parts) - parts
    return owner, (np.arange(len(owner)) - first[owner]).astype(np.int32)


def _per_head(columns: list[Int32Array], heads: int) -> Int32Array:
    """Task rows: every row of the four columns once for each K/V head, which becomes column 4."""
    tasks = np.zeros((len(columns[0]) * heads, TASK_FIELDS), np.int32)
    for index, column in enumerate(columns):
        tasks[:, index] = np.repeat(column, heads)
    tasks[:, 4] = np.tile(np.arange(heads), len(columns[0]))
    return tasks


def _balance(tasks: Int32Array, costs: Int32Array, threads: int) -> tuple[Int32Array, Int32Array]:
    """Deal the tasks, longest first, to threads 0 1 .. n n .. 1 0 0 1 ..; each thread's list ordered by what it reads."""
    lap, step = np.divmod(np.arange(len(tasks)), threads)
    thread = np.empty(len(tasks), np.int32)
    thread[np.argsort(-costs, kind="stable")] = np.where(lap % 2, threads - 1 - step, step)
    order = np.lexsort((tasks[:, 3], tasks[:, 2], tasks[:, 4], tasks[:, 0], thread))
    sizes = np.bincount(thread, minlength=threads)
    return tasks[order], np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
