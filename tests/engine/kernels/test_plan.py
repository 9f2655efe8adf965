"""Task plans: every (row, head, span) exactly once, cut at absolute positions, shared evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.engine.kernels.plan import KEY_SPAN, AttentionShape, Planner, plan_attention

SHAPE = AttentionShape(9, 3, 64, 16, "float16")
chunks = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 700)), max_size=6)


@given(chunks, st.integers(1, 5))
def test_every_row_and_head_is_computed_exactly_once(chunks: list[tuple[int, int]], threads: int) -> None:
    starts, counts = [start for start, _ in chunks], [count for _, count in chunks]
    plan = plan_attention(SHAPE, threads, starts=starts, counts=counts)
    done: list[tuple[int, int, int, int]] = []  # (table row, q row, position, head)
    for sequence, row, size, position, head, _ in plan.prefill.tasks.tolist():
        assert 1 <= size <= SHAPE.query_tile
        done += [(sequence, row + i, position + i, head) for i in range(size)]
    spans: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
    for sequence, row, span, position, head, slot in plan.decode.tasks.tolist():
        spans.setdefault((sequence, row, position, head), []).append((span, slot))
    for (_, _, position, _), parts in spans.items():
        assert sorted(span for span, _ in parts) == list(range(position // KEY_SPAN + 1))
    expected, row = [], 0
    for sequence, (start, count) in enumerate(chunks):
        expected += [(sequence, row + i, start + i, head) for i in range(count) for head in range(3)]
        row += count
    assert sorted(done + list(spans)) == expected


@given(chunks, st.integers(1, 5))
def test_merges_name_the_workspace_slots_of_the_spans(chunks: list[tuple[int, int]], threads: int) -> None:
    starts, counts = [start for start, _ in chunks], [1] * len(chunks)
    plan = plan_attention(SHAPE, threads, starts=starts, counts=counts).decode
    written = {(row, head, span): slot for _, row, span, _, head, slot in plan.tasks.tolist() if slot >= 0}
    read = {
        (row, head, span): first + span
        for row, head, first, spans in plan.merges.tolist()
        for span in range(spans)
    }
    assert read == written
    assert len(set(written.values())) == len(written)
    assert max(written.values(), default=0) < plan.workspace[0]
    assert plan.workspace[1:] == (3, 96)


@given(chunks, st.integers(1, 5))
def test_threads_share_the_tasks(chunks: list[tuple[int, int]], threads: int) -> None:
    plan = plan_attention(SHAPE, threads, starts=[c[0] for c in chunks], counts=[c[1] for c in chunks])
    for part in (plan.prefill, plan.decode):
        sizes = np.diff(part.thread_tasks)
        assert part.thread_tasks[0] == 0
        assert len(sizes) == threads
        assert sizes.sum() == len(part.tasks)
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(("start", "count"), [(0, 512), (1500, 256), (4095, 1)])
def test_two_threads_get_equal_work(start: int, count: int) -> None:
    """Keys read by each thread, of one sequence alone: at most one task apart."""
    plan = plan_attention(SHAPE, 2, starts=[start], counts=[count])
    part = plan.prefill if count > 1 else plan.decode
    if count > 1:
        work = part.tasks[:, 2] * (part.tasks[:, 3] + part.tasks[:, 2])
    else:
        work = np.minimum(KEY_SPAN, part.tasks[:, 3] + 1 - part.tasks[:, 2] * KEY_SPAN)
    loads = np.add.reduceat(work, part.thread_tasks[:-1])
    assert abs(int(loads[0]) - int(loads[1])) <= work.max()


def test_a_decode_of_one_span_needs_no_merge() -> None:
    plan = plan_attention(SHAPE, 2, starts=[511, 512], counts=[1, 1]).decode
    assert plan.merges.tolist() == [[1, 0, 0, 2], [1, 1, 2, 2], [1, 2, 4, 2]]
    assert plan.workspace == (6, 3, 96)
    assert sorted(plan.tasks[plan.tasks[:, 0] == 0].tolist()) == [
        [0, 0, 0, 511, head, -1] for head in range(3)
    ]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((9, 2, 64, 16, "float16"), "group"),
        ((4, 0, 64, 16, "float16"), "group"),
        ((4, 4, 72, 16, "float16"), "multiple of 16"),
        ((4, 4, 0, 16, "float16"), "multiple of 16"),
        ((4, 4, 64, 8, "float16"), "page size"),
        ((4, 4, 64, 16, "int8"), "dtype"),
    ],
)
def test_shapes_without_a_kernel_are_refused(arguments: tuple[int, int, int, int, str], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        AttentionShape(*arguments)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 70)), min_size=1, max_size=4), st.integers(1, 3)
)
def test_a_kept_plan_names_the_same_work(rows: list[tuple[int, int]], threads: int) -> None:
    """Decodes step after step, over the ends of key blocks and spans: as if each step were planned alone."""
    planner = Planner(SHAPE, threads)
    for step in range(max(length for _, length in rows)):
        starts = [start + step for start, length in rows if step < length]
        counts = [1] * len(starts)
        found, alone = (
            planner.plan(starts, counts),
            plan_attention(SHAPE, threads, starts=starts, counts=counts),
        )
        assert sorted(found.decode.tasks.tolist()) == sorted(alone.decode.tasks.tolist())
        assert found.decode.merges.tolist() == alone.decode.merges.tolist()
        assert found.decode.workspace == alone.decode.workspace
        assert found.decode.thread_tasks[-1] == len(found.decode.tasks)
        assert not len(found.prefill.tasks)


def test_a_prefill_between_decodes_is_planned_anew() -> None:
    planner = Planner(SHAPE, 2)
    planner.plan([70], [1])
    assert len(planner.plan([0], [100]).prefill.tasks)
    assert planner.plan([71], [1]).decode.tasks[:, 3].tolist() == [71, 71, 71]
