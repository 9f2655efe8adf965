"""Who holds each page of the KV pool.

Owns: the state and the owner of every page. Does not know: what a page holds, why it was taken, the clock.
Invariant after every call: ``free + cached + running + reserved + quarantined == total``, each page with one owner.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

from microserving.errors import InternalError


class PageState(Enum):
    """free: nobody's. cached: kept for reuse, evictable. running: a sequence's. reserved: waits for remote writes.

    quarantined: its lease ended while a writer was still writing; nobody may have it until the writer stopped.
    """

    FREE = "free"
    CACHED = "cached"
    RUNNING = "running"
    RESERVED = "reserved"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class PageCounts:
    free: int
    cached: int
    running: int
    reserved: int
    quarantined: int
    total: int


class PageAllocator:
    """Page ids 0 .. total - 1. The page freed last is given out first (its memory is still warm)."""

    def __init__(self, total_pages: int) -> None:
        if total_pages < 1:
            raise InternalError(f"a pool of {total_pages} pages")
        self._free = list(range(total_pages - 1, -1, -1))
        self._states = [PageState.FREE] * total_pages
        self._owners: list[Hashable | None] = [None] * total_pages
        self._counts = dict.fromkeys(PageState, 0)
        self._counts[PageState.FREE] = total_pages

    @property
    def total(self) -> int:
        return len(self._states)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def counts(self) -> PageCounts:
        return PageCounts(**{state.value: n for state, n in self._counts.items()}, total=self.total)

    def owner(self, page: int) -> Hashable | None:
        """Who holds ``page``; None when it is free."""
        return self._owners[page]

    def allocate(self, count: int, state: PageState, owner: Hashable) -> list[int]:
        """Take ``count`` free pages. Raises InternalError when there are not as many: look at ``free`` first."""
        if not 0 <= count <= self.free:
            raise InternalError(f"{count} pages asked for, {self.free} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._set(page, state, owner)
        return pages

    def transfer(self, pages: Sequence[int], owner: Hashable, state: PageState, new_owner: Hashable) -> None:
        """Hand pages on without freeing them. Raises InternalError unless all of them are ``owner``'s."""
        self._require_owned(pages, owner)
        for page in pages:
            self._set(page, state, new_owner)

    def release(self, pages: Sequence[int], owner: Hashable) -> None:
        """Give pages back. Raises InternalError on a double or foreign free; then nothing was changed."""
        self._require_owned(pages, owner)
        for page in pages:
            self._set(page, PageState.FREE, None)
            self._free.append(page)

    def check(self) -> None:
        """Raises InternalError when the books do not balance. Costs O(total): for tests and idle time."""
        counted = {state: self._states.count(state) for state in PageState}
        if counted != self._counts or sum(counted.values()) != self.total:
            raise InternalError(f"page counts {self._counts} differ from the pages {counted}")
        free = {page for page, state in enumerate(self._states) if state is PageState.FREE}
        if free != set(self._free) or len(free) != len(self._free):
            raise InternalError("the free list differs from the pages' states")
        if any((owner is None) != (page in free) for page, owner in enumerate(self._owners)):
            raise InternalError("a free page with an owner, or a held page without one")

    def _require_owned(self, pages: Sequence[int], owner: Hashable) -> None:
        if len(set(pages)) != len(pages):
            raise InternalError(f"the same page twice in {list(pages)}")
        for page in pages:
            if not 0 <= page < self.total or self._owners[page] is None or self._owners[page] != owner:
                raise InternalError(f"page {page} is not held by {owner!r}")

    def _set(self, page: int, state: PageState, owner: Hashable | None) -> None:
        self._counts[self._states[page]] -= 1
        self._counts[state] += 1
        self._states[page] = state
        self._owners[page] = owner
