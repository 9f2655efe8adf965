"""The page books: counts that add up, and refusals that change nothing."""

import pytest

from microserving.errors import InternalError
from microserving.scheduler import PageAllocator, PageCounts, PageState


def test_pages_move_through_their_states() -> None:
    allocator = PageAllocator(8)
    lease = allocator.allocate(3, PageState.RESERVED, "lease")
    running = allocator.allocate(2, PageState.RUNNING, "sequence")
    assert sorted(lease + running) == [0, 1, 2, 3, 4]
    assert allocator.counts == PageCounts(free=3, cached=0, running=2, reserved=3, quarantined=0, total=8)

    allocator.transfer(lease, "lease", PageState.QUARANTINED, "lease")
    assert allocator.counts == PageCounts(free=3, cached=0, running=2, reserved=0, quarantined=3, total=8)
    allocator.transfer(running, "sequence", PageState.CACHED, "cache")
    assert allocator.counts == PageCounts(free=3, cached=2, running=0, reserved=0, quarantined=3, total=8)

    allocator.release(lease, "lease")
    allocator.release(running, "cache")
    assert allocator.counts == PageCounts(free=8, cached=0, running=0, reserved=0, quarantined=0, total=8)
    allocator.check()


def test_the_page_freed_last_is_given_out_first() -> None:
    allocator = PageAllocator(4)
    first, _ = allocator.allocate(2, PageState.RUNNING, "a")
    allocator.release([first], "a")
    assert allocator.allocate(1, PageState.RUNNING, "b") == [first]


def test_a_double_free_is_refused_and_changes_nothing() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2, PageState.RUNNING, "a")
    allocator.release(pages[:1], "a")
    with pytest.raises(InternalError, match="not held by"):
        allocator.release(pages, "a")
    with pytest.raises(InternalError, match="twice"):
        allocator.release([pages[1], pages[1]], "a")
    assert allocator.counts.running == 1
    assert allocator.owner(pages[1]) == "a"
    allocator.check()


@pytest.mark.parametrize("page", [-1, 4, 0])
def test_a_foreign_free_is_refused(page: int) -> None:
    allocator = PageAllocator(4)
    allocator.allocate(1, PageState.RUNNING, "a")
    with pytest.raises(InternalError):
        allocator.release([page], "b")
    with pytest.raises(InternalError):
        allocator.transfer([page], "b", PageState.CACHED, "b")
    allocator.check()


def test_more_pages_than_are_free_are_refused() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(3, PageState.RUNNING, "a")
    with pytest.raises(InternalError, match="2 pages asked for, 1 are free"):
        allocator.allocate(2, PageState.RUNNING, "b")
    assert allocator.free == 1
