"""Pages for sequences and leases: shared ones from the prefix cache, the rest of their own, eviction when they lack.

Owns: the allocator, the cache, and the rule that who holds pages has k shared ones (pinned by one handle), then its own.
Does not know: who may have pages when (that is the scheduler's), nor what becomes of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from microserving.errors import InternalError
from microserving.scheduler.page_allocator import PageAllocator, PageCounts, PageState
from microserving.scheduler.prefix_cache import PageCopy, PrefixCache, PrefixHandle


class PageHolder(Protocol):
    """A sequence or a lease. Position p lies in ``pages[p // page_size]``; handle: None = holds nothing."""

    salt: str
    pages: list[int]
    handle: PrefixHandle | None

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Grant:
    """matched: the first positions whose K/V is there, once ``copies`` are made."""

    matched: int
    copies: list[PageCopy]


class PagePool:
    """``freed`` moves whenever pages became free or evictable."""

    def __init__(self, total_pages: int, page_size: int, *, prefix_cache: bool) -> None:
        self.page_size = page_size
        self.freed = 0
        self.allocator = PageAllocator(total_pages)
        self.cache = PrefixCache(page_size, self.allocator, enabled=prefix_cache)

    @property
    def available(self) -> int:
        """Pages that are free or can be made so at once."""
        return self.allocator.free + self.cache.evictable

    @property
    def counts(self) -> PageCounts:
        return self.allocator.counts

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def missing(self, holder: PageHolder, positions: int) -> int:
        """Pages that ``holder`` lacks for so many positions."""
        return self.pages_for(positions) - len(holder.pages)

    def open(
        self,
        holder: PageHolder,
        state: PageState,
        tokens: Seq[int],
        positions: int,
        *,
        shared_limit: int,
        spare: int,
    ) -> Grant | None:
        """Give ``holder`` pages for ``positions``, as many of them shared as hold a cached prefix of ``tokens``.

        shared_limit: behind so many positions nothing is shared, it will be written. None, and nothing is changed, when
        fewer than ``spare`` pages would be left to others; who takes nothing from them is never refused.
        """
        before = self.available
        handle = self.cache.acquire(holder.salt, tokens, shared_limit)
        own = self.pages_for(positions) - handle.shared
        if not self._enough(own, spare, before):
            self.cache.drop_source(handle)
        if not self._enough(own, spare, before):
            self.cache.release(handle)
            return None
        holder.handle = handle
        holder.pages = handle.pages + self._take(own, state, holder)
        copies = []
        if handle.source_page is not None:
            copies.append(PageCopy(handle.source_page, holder.pages[handle.shared], handle.source_tokens))
        return Grant(handle.matched, copies)

    def grow(self, holder: PageHolder, positions: int) -> None:
        """More running pages, so that there are enough for ``positions``. Raises InternalError if they lack."""
        holder.pages += self._take(self.missing(holder, positions), PageState.RUNNING, holder)

    def copies_made(self, holder: PageHolder) -> None:
        """What it copied from need not be kept for it."""
        self.cache.drop_source(_handle(holder))

    def publish(self, holder: PageHolder, tokens: Seq[int], *, tail: bool = False) -> None:
        """All of ``tokens`` have their K/V in the holder's pages: whole pages become shared, pinned by the holder.

        tail: the last page too, although it is not whole; it is the holder's no more, who must release next.
        """
        duplicates = self.cache.publish(_handle(holder), tokens, holder.pages, holder)
        self.freed += bool(duplicates)
        handle = _handle(holder)
        if tail and self.cache.publish_tail(handle, tokens, holder.pages, holder):
            del holder.pages[handle.shared]

    def adopt(self, holder: PageHolder, tokens: Seq[int]) -> int:
        """Share what others have published since; returns how many positions the holder shares now."""
        shared = self.cache.adopt(_handle(holder), tokens, holder.pages, holder)
        self.freed += 1
        return shared * self.page_size

    def release(self, holder: PageHolder) -> None:
        """Free the holder's own pages and unpin the shared ones. Idempotent."""
        if holder.handle is None:
            return
        self.allocator.release(holder.pages[holder.handle.shared :], holder)
        self._unpin(holder)

    def quarantine(self, holder: PageHolder) -> None:
        """Keep the holder's own pages from everybody until ``release_quarantined``; unpin the shared ones."""
        own = holder.pages[_handle(holder).shared :]
        self.allocator.transfer(own, holder, PageState.QUARANTINED, holder)
        self._unpin(holder)
        holder.pages = own

    def release_quarantined(self, holder: PageHolder) -> None:
        self.allocator.release(holder.pages, holder)
        self.freed += 1
        holder.pages = []

    def hand_over(self, giver: PageHolder, taker: PageHolder) -> None:
        """Everything that ``giver`` holds becomes ``taker``'s, running."""
        handle = _handle(giver)
        self.allocator.transfer(giver.pages[handle.shared :], giver, PageState.RUNNING, taker)
        taker.pages, taker.handle = giver.pages, handle
        giver.pages, giver.handle = [], None

    def _unpin(self, holder: PageHolder) -> None:
        self.cache.release(_handle(holder))
        holder.pages, holder.handle = [], None
        self.freed += 1

    def _enough(self, own: int, spare: int, before: int) -> bool:
        left = self.available - own
        return left >= 0 and (left >= spare or left == before)

    def _take(self, count: int, state: PageState, holder: PageHolder) -> list[int]:
        self.cache.evict(max(count - self.allocator.free, 0))
        return self.allocator.allocate(count, state, holder)


def _handle(holder: PageHolder) -> PrefixHandle:
    if holder.handle is None:
        raise InternalError("it holds no pages")
    return holder.handle
