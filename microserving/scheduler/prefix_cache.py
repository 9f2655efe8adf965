"""Which K/V pages hold which prefixes: a radix tree over token ids, one node per page.

Owns: the tree, who pins what in it, the order of eviction, and with it every page that is ``cached``. Does not know: who
computes or receives K/V, or why pages are wanted.

- A node's key is the token ids of its page as bytes; a page of fewer tokens than ``page_size`` is a leaf for ever. Every
  salt has a tree of its own, so salt and tokens are never in one key space. Keys are compared, never only hashed.
- Siblings are sorted by key: the one that shares the most tokens with a wanted page is a neighbour of the place where
  that page would stand, whether it shares all of them or some.
- A pin goes on every node from the root down, so what is below an unpinned node is unpinned too: the evictable pages
  are exactly the unpinned ones.
- Unpinned nodes are kept in the order of their last unpinning, deepest first. A node that was pinned had its parent
  pinned at least as long, hence the first of that order is always a leaf, and the least recently used one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from microserving.errors import InternalError
from microserving.scheduler.page_allocator import PageAllocator, PageState

TOKEN_TYPE = "i"
TOKEN_BYTES = array(TOKEN_TYPE).itemsize

CACHE = "prefix cache"
"""The owner of cached pages."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the K/V of the first ``tokens`` positions of ``source_page`` before ``target_page`` is read or written."""

    source_page: int
    target_page: int
    tokens: int


class _Node:
    """``keys[i]`` is the key of ``children[i]``, sorted. A root has no parent, no page, and its salt."""

    __slots__ = ("children", "key", "keys", "page", "parent", "pins", "salt")

    def __init__(self, key: bytes, page: int, parent: _Node | None, pins: int, salt: str) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.pins = pins
        self.salt = salt
        self.keys: list[bytes] = []
        self.children: list[_Node] = []


class PrefixHandle:
    """The pinned pages of one holder: ``pages``, whole and shared, and for a while the page that it copies from.

    matched: how many tokens were found, in both. Release it once, to the cache that made it.
    """

    __slots__ = ("_nodes", "_root", "_source", "matched", "source_tokens")

    def __init__(
        self, root: _Node, nodes: list[_Node], source: _Node | None, matched: int, tokens: int
    ) -> None:
        self._root = root
        self._nodes = nodes
        self._source = source
        self.matched = matched
        self.source_tokens = tokens

    @property
    def shared(self) -> int:
        """How many pages of the tree it pins, from position 0 on."""
        return len(self._nodes)

    @property
    def pages(self) -> list[int]:
        return [node.page for node in self._nodes]

    @property
    def source_page(self) -> int | None:
        """A page of which the first ``source_tokens`` positions go on where ``pages`` end."""
        return None if self._source is None else self._source.page

    def pinned(self) -> list[_Node]:
        return self._nodes if self._source is None else [*self._nodes, self._source]

    def tip(self) -> _Node:
        return self._nodes[-1] if self._nodes else self._root


class PrefixCache:
    """Every call costs time linear in the tokens given to it, never in the size of the tree.

    enabled: a cache that is not never finds and never keeps anything.
    """

    def __init__(self, page_size: int, allocator: PageAllocator, *, enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.query_tokens = 0
        self.hit_tokens = 0
        self.evicted_pages = 0
        self._allocator = allocator
        self._key_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, _Node] = {}
        self._pages = 0
        self._unpinned: OrderedDict[_Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Pages in the tree."""
        return self._pages

    @property
    def evictable(self) -> int:
        """Pages that ``evict`` can free now."""
        return len(self._unpinned)

    @property
    def pinned(self) -> int:
        return self._pages - len(self._unpinned)

    def match(self, salt: str, tokens: Seq[int]) -> int:
        """How many of the first ``tokens`` are cached. Reads only."""
        root = self._roots.get(salt)
        if root is None:
            return 0
        nodes, _, rest = self._walk(root, _as_bytes(tokens), len(tokens) // self.page_size)
        return len(nodes) * self.page_size + rest

    def acquire(self, salt: str, tokens: Seq[int], shared_limit: int) -> PrefixHandle:
        """Find and pin the longest cached prefix of ``tokens``.

        Whole pages of the first ``shared_limit`` tokens are shared; what is found behind them, a page at the most, is
        for copying.
        """
        wanted = tokens if self.enabled else ()
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = _Node(b"", -1, None, 0, salt)
        limit = min(shared_limit, len(wanted)) // self.page_size
        nodes, source, rest = self._walk(root, _as_bytes(wanted), limit)
        handle = PrefixHandle(root, nodes, source, len(nodes) * self.page_size + rest, rest)
        root.pins += 1
        for node in handle.pinned():
            self._pin(node)
        return handle

    def count(self, asked: int, found: int) -> None:
        """Count a look-up that led to something: ``found`` of ``asked`` tokens need not be computed."""
        self.query_tokens += asked
        self.hit_tokens += found

    def drop_source(self, handle: PrefixHandle) -> None:
        """The copy was made, or will not be: only the shared pages stay pinned. Idempotent."""
        if handle._source is not None:
            self._unpin(handle._source)
            handle.matched -= handle.source_tokens
            handle._source, handle.source_tokens = None, 0

    def release(self, handle: PrefixHandle) -> None:
        """Unpin everything. Once."""
        self.drop_source(handle)
        for node in reversed(handle._nodes):
            self._unpin(node)
        handle._nodes = []
        handle._root.pins -= 1
        self._drop_empty(handle._root)

    # --- growing and shrinking -------------------------------------------------------------------------------

    def publish(self, handle: PrefixHandle, tokens: Seq[int], pages: list[int], owner: Hashable) -> int:
        """Put ``owner``'s whole pages behind the handle's into the tree, and pin them with it.

        pages: of ``tokens``, all of them computed; the handle's come first. A page that the tree has already replaces
        the owner's in ``pages``, and the owner's is freed. Returns how many were freed.
        """
        if not self.enabled:
            return 0
        new: list[int] = []
        duplicates: list[int] = []
        first, end = handle.shared, len(tokens) // self.page_size
        data = _as_bytes(tokens[first * self.page_size : end * self.page_size])
        for index, key in enumerate(self._cut(data), first):
            parent = handle.tip()
            at, child = self._find(parent, key)
            if child is None:
                child = self._insert(parent, at, key, pages[index])
                new.append(child.page)
                child.pins = 1
            else:
                duplicates.append(pages[index])
                pages[index] = child.page
                self._pin(child)
            handle._nodes.append(child)
        self._allocator.transfer(new, owner, PageState.CACHED, CACHE)
        self._allocator.release(duplicates, owner)
        return len(duplicates)

    def publish_tail(self, handle: PrefixHandle, tokens: Seq[int], pages: Seq[int], owner: Hashable) -> bool:
        """Put the page of the tokens behind the handle's pages, less than a whole one, into the tree, not pinned.

        False when there are none or the tree has them already: then the page is still ``owner``'s.
        """
        tail = _as_bytes(tokens[handle.shared * self.page_size :])
        if not tail or not self.enabled:
            return False
        if len(tail) >= self._key_bytes:
            raise InternalError(f"a last page of {len(tail) // TOKEN_BYTES} tokens")
        parent = handle.tip()
        at = bisect_left(parent.keys, tail)
        if at < len(parent.keys) and parent.keys[at].startswith(tail):
            return False
        page = pages[handle.shared]
        self._unpinned[self._insert(parent, at, tail, page)] = None
        self._allocator.transfer([page], owner, PageState.CACHED, CACHE)
        return True

    def adopt(self, handle: PrefixHandle, tokens: Seq[int], pages: list[int], owner: Hashable) -> int:
        """Pin more whole pages of ``tokens`` that the tree has by now; returns how many the handle shares.

        They replace the owner's in ``pages``, which are freed, or are appended.
        """
        first = handle.shared
        data = _as_bytes(tokens[first * self.page_size :])
        for index, key in enumerate(self._cut(data), first):
            _, child = self._find(handle.tip(), key)
            if child is None or len(key) < self._key_bytes:
                break
            self._pin(child)
            handle._nodes.append(child)
            self._allocator.release(pages[index : index + 1], owner)
            pages[index : index + 1] = [child.page]
        return handle.shared

    def evict(self, count: int) -> None:
        """Free the ``count`` pages that were used least recently. Raises InternalError when fewer are evictable."""
        if count > self.evictable:
            raise InternalError(f"{count} pages to evict, {self.evictable} are evictable")
        evicted = [self._unpinned.popitem(last=False)[0] for _ in range(count)]
        for node in evicted:
            self._remove(node)
        self._allocator.release([node.page for node in evicted], CACHE)
        self.evicted_pages += len(evicted)

    def check(self, handles: Iterable[PrefixHandle]) -> None:
        """Raises InternalError unless tree, pins and pages agree; ``handles``: all live ones. Costs O(pages)."""
        pins: dict[_Node, int] = {}
        for handle in handles:
            for node in (handle._root, *handle.pinned()):
                pins[node] = pins.get(node, 0) + 1
        nodes = list(self._nodes())
        for node in (*self._roots.values(), *nodes):
            if node.pins != pins.pop(node, 0):
                raise InternalError(f"page {node.page} has {node.pins} pins that are not its handles'")
            if node.keys != sorted(set(node.keys)) or [c.key for c in node.children] != node.keys:
                raise InternalError(f"the children of page {node.page} are out of order")
        if pins:
            raise InternalError("a handle pins what is not in the tree")
        if {node for node in nodes if not node.pins} != self._unpinned.keys() or len(nodes) != self._pages:
            raise InternalError("the tree and the order of eviction differ")
        if any(self._allocator.owner(node.page) != CACHE for node in nodes):
            raise InternalError("the tree has a page that is not its own")
        if self._allocator.counts.cached != self._pages:
            raise InternalError("a cached page is not in the tree")
        if any(not root.children and not root.pins for root in self._roots.values()):
            raise InternalError("an empty tree was kept")

    # --- helpers ---------------------------------------------------------------------------------------------

    def _walk(self, root: _Node, data: bytes, limit: int) -> tuple[list[_Node], _Node | None, int]:
        """Up to ``limit`` whole pages; then the child that shares the most of what follows, and how many tokens."""
        nodes: list[_Node] = []
        node, size, start = root, self._key_bytes, 0
        while len(nodes) < limit:
            _, child = self._find(node, data[start : start + size])
            if child is None:
                break
            nodes.append(child)
            node, start = child, start + size
        best, most = None, 0
        rest = data[start : start + size]
        at = bisect_left(node.keys, rest)
        for neighbour in range(max(at - 1, 0), min(at + 1, len(node.keys)) if rest else 0):
            common = _common_tokens(node.keys[neighbour], rest)
            if common > most:
                best, most = node.children[neighbour], common
        return nodes, best, most

    @staticmethod
    def _find(parent: _Node, key: bytes) -> tuple[int, _Node | None]:
        """Where ``key`` stands or would stand among the children, and the child that has it."""
        at = bisect_left(parent.keys, key)
        found = at < len(parent.keys) and parent.keys[at] == key
        return at, parent.children[at] if found else None

    def _insert(self, parent: _Node, at: int, key: bytes, page: int) -> _Node:
        """A new child at its place; shorter last pages that it begins with are superseded, and free."""
        while at and key.startswith(parent.keys[at - 1]) and not parent.children[at - 1].pins:
            at -= 1
            superseded = parent.children[at]
            del self._unpinned[superseded]
            self._remove(superseded)
            self._allocator.release([superseded.page], CACHE)
        child = _Node(key, page, parent, 0, parent.salt)
        parent.keys.insert(at, key)
        parent.children.insert(at, child)
        self._pages += 1
        return child

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        if parent is None or node.children:
            raise InternalError("only leaves leave the tree")
        at, _ = self._find(parent, node.key)
        del parent.keys[at], parent.children[at]
        self._pages -= 1
        self._drop_empty(parent)

    def _drop_empty(self, node: _Node) -> None:
        if node.parent is None and not node.children and not node.pins:
            del self._roots[node.salt]

    def _pin(self, node: _Node) -> None:
        if not node.pins:
            del self._unpinned[node]
        node.pins += 1

    def _unpin(self, node: _Node) -> None:
        node.pins -= 1
        if not node.pins:
            self._unpinned[node] = None

    def _cut(self, data: bytes) -> Iterator[bytes]:
        return (data[at : at + self._key_bytes] for at in range(0, len(data), self._key_bytes))

    def _nodes(self) -> Iterator[_Node]:
        pending = [child for root in self._roots.values() for child in root.children]
        while pending:
            node = pending.pop()
            yield node
            pending += node.children


def _as_bytes(tokens: Seq[int]) -> bytes:
    return array(TOKEN_TYPE, tokens).tobytes()


def _common_tokens(one: bytes, other: bytes) -> int:
    """How many whole tokens both begin with."""
    shorter = min(len(one), len(other))
    for at in range(0, shorter, TOKEN_BYTES):
        if one[at : at + TOKEN_BYTES] != other[at : at + TOKEN_BYTES]:
            return at // TOKEN_BYTES
    return shorter // TOKEN_BYTES
