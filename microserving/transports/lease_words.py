"""The receiver's lease words: which lease holds which word, and when the word says so.

Owns the words' contents. Does not know where the memory comes from or how a writer hears of its word.

A word holds a lease's id from the grant to the lease's end, else 0. It may be given to another lease as soon as it is
clear, even while the earlier lease's writer is stopped: ids are unique, so that writer finds an id that is not its own.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

LEASE_WORDS = 4096
"""Leases that can be written to at once."""
LEASE_BYTES = LEASE_WORDS * 8


class LeaseWords:
    """Thread-safe. words: int64, zero; written here only, read by writers (of other processes) at any time.

    The order is ``claim``, ``grant``, ``end``; an ``end`` that overtakes the ``grant`` wins.
    """

    def __init__(self, words: npt.NDArray[np.int64]) -> None:
        self._words = words
        self._lock = threading.Lock()  # guards the two below and all stores
        self._free = list(range(len(words) - 1, -1, -1))
        self._held: dict[int, int] = {}

    def claim(self, lease_id: int) -> int | None:
        """The word that will be this lease's. None: the id is no id, has one already, or there is no word left."""
        with self._lock:
            if not 0 < lease_id < 1 << 63 or lease_id in self._held or not self._free:
                return None
            word = self._held[lease_id] = self._free.pop()
            return word

    def grant(self, lease_id: int) -> None:
        """Let the puts begin, unless the lease ended since ``claim``."""
        with self._lock:
            word = self._held.get(lease_id)
            if word is not None:
                self._words[word] = lease_id

    def end(self, lease_id: int) -> None:
        """Let no put begin any more. Idempotent."""
        with self._lock:
            word = self._held.pop(lease_id, None)
            if word is not None:
                self._words[word] = 0
                self._free.append(word)

    def end_all(self) -> None:
        with self._lock:
            leases = list(self._held)
        for lease_id in leases:
            self.end(lease_id)
