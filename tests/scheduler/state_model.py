"""What the scheduler's state machine knows on its own: the K/V in each slot, what was published, and what ran so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from microserving.scheduler import LeasedPages, LeaseState, PageAllocator, PageCopy, PageState, Sequence

PAGE = 4
TTL = 10.0
CACHE = "prefix cache"
LIVE = (LeaseState.ISSUED, LeaseState.WRITING, LeaseState.ARRIVED)

Path = tuple[str, tuple[int, ...]]
"""The salt and the tokens from position 0 on."""


class Memory:
    """(page, offset) -> the path whose last position's K/V is there."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], Path | str] = {}

    def write(self, pages: list[int], salt: str, tokens: list[int], first: int, end: int) -> None:
        for p in range(first, end):
            self._slots[pages[p // PAGE], p % PAGE] = (salt, tuple(tokens[: p + 1]))

    def spoil(self, pages: list[int], first: int, end: int) -> None:
        for p in range(first, end):
            self._slots[pages[p // PAGE], p % PAGE] = "rubbish"

    def copy(self, copies: list[PageCopy]) -> None:
        for copy in copies:
            assert 0 < copy.tokens <= PAGE
            for offset in range(copy.tokens):
                self._slots[copy.target_page, offset] = self._slots[copy.source_page, offset]

    def holds(self, page: int, offset: int, path: Path) -> bool:
        return self._slots.get((page, offset)) == path

    def require(self, pages: list[int], salt: str, tokens: list[int], end: int) -> None:
        for p in range(end):
            assert self.holds(pages[p // PAGE], p % PAGE, (salt, tuple(tokens[: p + 1]))), f"position {p}"


class Published:
    """What the allocator's moves say of the cache: page -> the path up to its last position."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.paths: dict[int, Path] = {}
        self._transfer, self._release = allocator.transfer, allocator.release
        allocator.transfer = self.on_transfer  # type: ignore[method-assign]
        allocator.release = self.on_release  # type: ignore[method-assign]

    def on_transfer(self, pages: list[int], owner: object, state: PageState, new_owner: object) -> None:
        self._transfer(pages, owner, state, new_owner)
        if state is not PageState.CACHED:
            return
        assert isinstance(owner, Sequence | LeasedPages)
        for page in pages:
            whole = (owner.pages.index(page) + 1) * PAGE
            if isinstance(owner, Sequence):
                tokens, there = owner.tokens, owner.computed or whole
            else:
                tokens, there = list(owner.prompt), owner.end
            self.paths[page] = (owner.salt, tuple(tokens[: min(whole, there)]))

    def on_release(self, pages: list[int], owner: object) -> None:
        self._release(pages, owner)
        if owner == CACHE:
            for page in pages:
                del self.paths[page]

    def longest(self, salt: str, tokens: list[int]) -> int:
        """By looking at every path."""
        return max((common(path, tokens) for of, path in self.paths.values() if of == salt), default=0)


def common(one: tuple[int, ...], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


@dataclass(eq=False)
class Request:
    """What the test knows of a sequence: how much output it shall have, what was put of it, how often it ended."""

    sequence: Sequence
    target: int
    put: set[int] = field(default_factory=set)
    endings: int = 0


@dataclass(eq=False)
class Writer:
    """It may be stopped and woken at any time, so it writes until ``end_write``, whatever became of its lease."""

    lease: LeasedPages
    pages: list[int]
    shared: int
    written: int
