"""numpy memory as TVM tensors without a copy: KV pools, lease words, and the small arrays of a step.

Does not know what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from microserving.engine.tvm_runtime import ALIGNMENT, aligned_bytes, tensor_of
from microserving.protocol.kv_layout import KVLayout

_FIRST_STAGING_BYTES = 1 << 16


def pool_tensor(memory: npt.NDArray[np.uint8], layout: KVLayout, total_pages: int) -> Any:
    """A KV pool's ``memory`` as a tensor of ``layout.shape``; the tensor keeps it mapped.

    Raises ValueError when it is too small, not uint8 [n], or not aligned.
    """
    size = layout.bytes_per_page * total_pages
    if memory.dtype != np.uint8 or memory.ndim != 1 or memory.nbytes < size or memory.ctypes.data % ALIGNMENT:
        raise ValueError(f"pool memory must be at least {size} bytes, uint8, aligned to {ALIGNMENT}")
    return tensor_of(memory[:size].view(layout.dtype).reshape(layout.shape(total_pages)))


def lease_tensor(leases: npt.NDArray[np.int64]) -> Any:
    """A receiver's lease words as a tensor over the same memory. Raises ValueError when they are not aligned int64."""
    if leases.dtype != np.int64 or leases.ndim != 1 or leases.ctypes.data % ALIGNMENT:
        raise ValueError(f"lease words must be int64, aligned to {ALIGNMENT}")
    return tensor_of(leases)


class Staging:
    """One block of memory that every step's input arrays are copied into: a tensor of its own costs 40 us each.

    The tensors of one ``place`` are valid until the next; use from one thread.
    """

    def __init__(self) -> None:
        self._memory = aligned_bytes(_FIRST_STAGING_BYTES)

    def place(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Any]:
        """A tensor with the contents of each array, in order."""
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        if ends[-1] > len(self._memory):
            self._memory = aligned_bytes(2 * ends[-1])
        return [self._placed(begin, array) for begin, array in zip([0, *ends[:-1]], arrays, strict=True)]

    def _placed(self, begin: int, array: npt.NDArray[Any]) -> Any:
        copy = self._memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return tensor_of(copy)
