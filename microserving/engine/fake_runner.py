"""A model runner without a model, and its tokenizer, for tests.

The logits depend on every K/V row of the sequence, as a real model's do.

Each layer hashes its input and position into one K and one V row in the pool, then "attends": it reads the rows of all
positions so far back from the pool and mixes each with its position. All in integers modulo 2**64, so a row's values
do not depend on the batch, and a wrong page, a row that was not sent or a wrong position changes every later logit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from microserving.engine.runner import LayerTimes, RemoteTarget, RunnerChunk, StepOutput
from microserving.errors import InternalError
from microserving.protocol.kv_layout import KVLayout
from microserving.transports.base import LeaseGuard, RemotePool
from microserving.transports.lease_words import LEASE_WORDS

Words = npt.NDArray[np.uint64]

TINY_LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, page_size=16, dtype="float16")


class FakeRunner:
    """A ``ModelRunner``. memory: uint8 [total_pages * layout.bytes_per_page], its KV pool; made here when None.

    ``before_run`` is called with each step's chunks: a test may record them, or raise to break the step.
    ``before_put`` is called with the layer before each layer's put into another pool, of ``run`` and ``copy_slots``.
    """

    def __init__(
        self,
        layout: KVLayout = TINY_LAYOUT,
        *,
        total_pages: int = 64,
        vocab_size: int = 256,
        max_context: int = 1024,
        memory: npt.NDArray[np.uint8] | None = None,
        before_run: Callable[[Sequence[RunnerChunk]], None] | None = None,
        before_put: Callable[[int], None] | None = None,
    ) -> None:
        self.layout = layout
        self._total_pages = total_pages
        self._vocab_size = vocab_size
        self._max_context = max_context
        self.memory = np.zeros(total_pages * layout.bytes_per_page, np.uint8) if memory is None else memory
        self._pool = _Pool(layout, self.memory, total_pages)
        self.before_run = before_run
        self.before_put = before_put
        self.now_ns: Callable[[], int] = time.monotonic_ns
        self.remote_pool = RemotePool(self.memory, total_pages, np.zeros(LEASE_WORDS, np.int64))
        """This pool as a sender in the same process sees it. Who grants a lease sets its word."""

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    @property
    def total_pages(self) -> int:
        return self._total_pages

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layout.bytes_per_token

    def run(self, chunks: Sequence[RunnerChunk]) -> StepOutput:
        if self.before_run is not None:
            self.before_run(chunks)
        remote = self._remote(chunks)
        times = np.zeros((3, self.layout.layers), np.int64)
        hidden = [_mix(np.asarray(chunk.token_ids, np.uint64) + _word(1)) for chunk in chunks]
        for layer in range(self.layout.layers):
            self._append(layer, chunks, hidden, self._pool)
            times[0, layer] = self.now_ns()
            if remote is not None:
                self._put(layer, chunks, hidden, remote)
            times[1, layer] = self.now_ns()
            hidden = [self._attend(layer, chunk, h) for chunk, h in zip(chunks, hidden, strict=True)]
            times[2, layer] = self.now_ns()
        rows = zip(chunks, hidden, strict=True)
        wanted = [word for chunk, h in rows for word in h[len(h) - chunk.logits :]]
        return StepOutput(self._logits(wanted), None if remote is None else LayerTimes(*times))

    def copy_slots(
        self,
        source: npt.NDArray[np.int32],
        target: npt.NDArray[np.int32],
        remote: RemoteTarget | None = None,
    ) -> LayerTimes | None:
        pool = (
            self._pool if remote is None else _Pool(self.layout, remote.pool.memory, remote.pool.total_pages)
        )
        self._check_slots(source, self.total_pages)
        self._check_slots(target, self.total_pages if remote is None else remote.pool.total_pages)
        if remote is None and np.isin(target, source).any():
            raise InternalError("a slot is both source and target of a copy")
        times = np.zeros((3, self.layout.layers), np.int64)
        for layer in range(self.layout.layers):
            times[0, layer] = self.now_ns()
            if remote is not None:
                self._about_to_put(layer)
            if remote is None or _holds(remote.pool, remote.guard):
                pool.write(layer, target.astype(np.int64), *self._pool.read(layer, source.astype(np.int64)))
            times[1:, layer] = self.now_ns()
        return None if remote is None else LayerTimes(*times)

    def _check_slots(self, slots: npt.NDArray[np.int32], pages: int) -> None:
        if ((slots < 0) | (slots >= pages * self.page_size)).any():
            raise InternalError("a slot of this copy is outside its pool")

    def _about_to_put(self, layer: int) -> None:
        if self.before_put is not None:
            self.before_put(layer)

    def _remote(self, chunks: Sequence[RunnerChunk]) -> _Pool | None:
        puts = [chunk.put for chunk in chunks if chunk.put is not None]
        if not puts:
            return None
        pool = puts[0].pool
        if any(put.pool is not pool for put in puts):
            raise ValueError("the puts of one step go to different pools")
        return _Pool(self.layout, pool.memory, pool.total_pages)

    def _append(
        self, layer: int, chunks: Sequence[RunnerChunk], hidden: Sequence[Words], pool: _Pool
    ) -> None:
        for chunk, h in zip(chunks, hidden, strict=True):
            slots = _slots(chunk.pages, chunk.start + len(h), self.page_size)[chunk.start :]
            pool.write(layer, slots, *self._rows(layer, chunk, h))

    def _put(self, layer: int, chunks: Sequence[RunnerChunk], hidden: Sequence[Words], pool: _Pool) -> None:
        self._about_to_put(layer)
        for chunk, h in zip(chunks, hidden, strict=True):
            if chunk.put is not None and _holds(chunk.put.pool, chunk.put.guard):
                sent = np.flatnonzero(chunk.put.slots >= 0)
                k, v = self._rows(layer, chunk, h)
                pool.write(layer, chunk.put.slots[sent].astype(np.int64), k[sent], v[sent])

    def _rows(self, layer: int, chunk: RunnerChunk, h: Words) -> tuple[Words, Words]:
        """K and V of a chunk: uint64 [tokens, kv_heads, head_dim], to be cut to the pool's item size."""
        at = np.arange(chunk.start, chunk.start + len(h), dtype=np.uint64)
        heads, dim = self.layout.kv_heads, self.layout.head_dim
        column = np.arange(heads * dim, dtype=np.uint64).reshape(1, heads, dim)
        base = _mix(h + at * _word(0x9E37) + _word(layer))[:, None, None]
        return _mix(base + column), _mix(base + column + _word(1 << 32))

    def _attend(self, layer: int, chunk: RunnerChunk, h: Words) -> Words:
        """The next layer's input of each position p: its own and what all rows of positions <= p add up to."""
        end = chunk.start + len(h)
        k, v = self._pool.read(layer, _slots(chunk.pages, end, self.page_size))
        column = _mix(np.arange(k.shape[1] * k.shape[2], dtype=np.uint64)).reshape(k.shape[1:])
        row: Words = ((k + v * _word(65537)) * column).sum(axis=(1, 2), dtype=np.uint64)
        weighted = _mix(row + np.arange(end, dtype=np.uint64) * _word(0x51ED))
        return _mix(h + np.cumsum(weighted, dtype=np.uint64)[chunk.start :])

    def _logits(self, hidden: Sequence[np.uint64]) -> npt.NDArray[np.float32]:
        """float32 [rows, vocab] in [-4, 4)."""
        last: Words = np.array(hidden, np.uint64).reshape(-1, 1)
        column: Words = np.arange(self._vocab_size, dtype=np.uint64)
        words: Words = last + column
        return ((_mix(words) >> _word(48)).astype(np.float32) / 8192.0 - 4.0).astype(np.float32)


class FakeTokenizer:
    """Token 7 reads as "<7>": the text says which tokens it was made of."""

    def __init__(self, vocab_size: int = 256, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    special_token_ids: frozenset[int] = frozenset()
    strips_first_space = False

    def token_bytes(self, token_id: int) -> bytes:
        """Of a byte-level vocabulary: what a grammar sees."""
        return bytes((token_id,)) if 0 <= token_id < 256 else b""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens  # it has none
        return list(text.encode())

    def detokenizer(self) -> FakeDetokenizer:
        return FakeDetokenizer()


class FakeDetokenizer:
    def put(self, token_id: int, /) -> str:
        return f"<{token_id}>"

    def flush(self) -> str:
        return ""


class _Pool:
    """A KV pool's memory by slots; ``layout`` says where K and V lie in a page."""

    def __init__(self, layout: KVLayout, memory: npt.NDArray[np.uint8], total_pages: int) -> None:
        word: type[np.unsignedinteger] = np.uint16 if layout.itemsize == 2 else np.uint32
        pages = memory.view(word).reshape(layout.shape(total_pages))
        k_shape = (
            (layout.head_dim, layout.page_size)
            if layout.k_transposed
            else (layout.page_size, layout.head_dim)
        )
        k = pages[:, :, 0].reshape(*pages.shape[:2], layout.kv_heads, *k_shape)
        v = pages[:, :, 1].reshape(*pages.shape[:2], layout.kv_heads, layout.page_size, layout.head_dim)
        # [layers, pages, page_size, kv_heads, head_dim], views of the memory
        self._k = k.transpose(0, 1, 4, 2, 3) if layout.k_transposed else k.transpose(0, 1, 3, 2, 4)
        self._v = v.transpose(0, 1, 3, 2, 4)
        self._page_size = layout.page_size
        if not np.shares_memory(self._k, memory):
            raise ValueError("the pool's memory must be contiguous")

    def write(self, layer: int, slots: npt.NDArray[np.int64], k: Words, v: Words) -> None:
        page, offset = np.divmod(slots, self._page_size)
        self._k[layer, page, offset] = k.astype(self._k.dtype)
        self._v[layer, page, offset] = v.astype(self._v.dtype)

    def read(self, layer: int, slots: npt.NDArray[np.int64]) -> tuple[Words, Words]:
        page, offset = np.divmod(slots, self._page_size)
        return self._k[layer, page, offset].astype(np.uint64), self._v[layer, page, offset].astype(np.uint64)


def _holds(pool: RemotePool, guard: LeaseGuard) -> bool:
    if not 0 <= guard.word < len(pool.leases) or guard.lease_id < 1:
        raise InternalError("a put has no lease word")
    return bool(pool.leases[guard.word] == guard.lease_id)


def _slots(pages: Sequence[int], end: int, page_size: int) -> npt.NDArray[np.int64]:
    """The pool slots of positions [0, end)."""
    at = np.arange(end)
    return np.asarray(pages, np.int64)[at // page_size] * page_size + at % page_size


def _word(value: int) -> np.uint64:
    return np.uint64(value)


def _mix(words: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that spreads every bit."""
    words = (words ^ (words >> _word(30))) * _word(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> _word(27))) * _word(0x94D049BB133111EB)
    return words ^ (words >> _word(31))
