"""What the host and the kernels that move K/V agree on: the columns of their arrays, and the orders of a copy.

Pure numpy; knows neither TVM nor requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PUT_BEGIN, PUT_END, LAYER_END = 0, 1, 2
"""Columns of ``times``, int64 [layers, 3]."""
GUARD_WORD, GUARD_ID = 0, 1
"""Columns of ``guards``, int64 [.., 2]: what they guard may be written while leases[word] == id."""
SOURCE, TARGET, LENGTH = 0, 1, 2
"""Columns of ``runs``, int32 [.., 3]: a run is ``length`` consecutive slots, inside one page at either end."""
COPY = "copy_slots"
"""The name of the slot copy in a compiled model."""


def copy_runs(
    source: npt.NDArray[np.int32], target: npt.NDArray[np.int32], page_size: int
) -> npt.NDArray[np.int32]:
    """int32 [runs, 3]: the longest runs of slots source[i] -> target[i] (int32 [n] each) that cross no page."""
    if not len(source):
        return np.zeros((0, 3), np.int32)
    goes_on = (np.diff(source) == 1) & (np.diff(target) == 1)
    new_page = (source[1:] % page_size == 0) | (target[1:] % page_size == 0)
    starts = np.flatnonzero(np.concatenate([[True], ~goes_on | new_page]))
    lengths = np.diff(np.append(starts, len(source)))
    return np.stack([source[starts], target[starts], lengths], axis=1).astype(np.int32)
