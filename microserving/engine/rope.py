"""Angles of rotary embeddings (Su et al. 2021, arXiv 2104.09864) for absolute positions, grown as positions are used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FIRST_SIZE = 1024


class RopeTable:
    """Rows of cosines and sines, computed in float64 and rounded to float32, so that every engine has the same bits."""

    def __init__(self, head_dim: int, theta: float) -> None:
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        self._frequencies = np.float64(theta) ** -exponents
        self._table = self._computed(0, _FIRST_SIZE)

    def rows(self, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """float32 [len(positions), head_dim]: cos of every frequency, then sin."""
        needed = int(positions.max()) + 1
        if needed > len(self._table):
            size = max(needed, 2 * len(self._table))
            self._table = np.concatenate((self._table, self._computed(len(self._table), size)))
        return self._table[positions]

    def _computed(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        angles = np.outer(np.arange(begin, end, dtype=np.float64), self._frequencies)
        return np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)
