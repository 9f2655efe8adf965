"""Packed weights in a file that is mapped: engines of one model on a machine share its memory.

Owns: the format. Bytes: magic, length and SHA-256 of the header, the header (JSON: name, tile kind, dtype, shape, offset and
SHA-256 of each array), the arrays, each at a multiple of 64 from the file's beginning; offsets count from the first.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from microserving.engine.kernels.tiles import TileKind
from microserving.engine.tvm_runtime import ALIGNMENT

_MAGIC = b"MSVPACK1"
_PREFIX = struct.Struct("<8sQ32s")  # magic, bytes of the header, SHA-256 of the header


class PackedWeight(NamedTuple):
    """A parameter as kernels read it. kind: None for a vector. The array must not be changed."""

    array: npt.NDArray[Any]
    kind: TileKind | None


Packed = Mapping[str, PackedWeight]


def write_packed(file: IO[bytes], packed: Packed, threads: int) -> None:
    """Raises OSError."""
    arrays = [weight.array for weight in packed.values()]
    entries, offset = [], 0
    for (name, (array, kind)), digest in zip(packed.items(), _digests(arrays, threads), strict=True):
        entries.append([name, kind, array.dtype.str, list(array.shape), offset, digest])
        offset += _aligned(array.nbytes)
    header = json.dumps(entries).encode()
    file.write(_PREFIX.pack(_MAGIC, len(header), hashlib.sha256(header).digest()) + header)
    position = _PREFIX.size + len(header)
    for array in arrays:
        file.write(bytes(_aligned(position) - position))
        file.write(array.data)
        position = _aligned(position) + array.nbytes


def read_packed(path: Path, threads: int) -> Packed:
    """Views of the mapped file, whose pages are shared with all who map it. Raises OSError, or ValueError when anything in
    it is not as it was written."""
    with path.open("rb") as file:
        memory = mmap.mmap(
            file.fileno(), 0, access=mmap.ACCESS_COPY
        )  # writable, as tensors have to be; never written
    entries, start = _entries(memory)
    packed, expected = {}, []
    for name, kind, dtype, shape, offset, digest in entries:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(memory, np.dtype(dtype), count, start + offset).reshape(shape)
        packed[name] = PackedWeight(array, kind)
        expected.append(digest)
    if _digests([weight.array for weight in packed.values()], threads) != expected:
        raise ValueError("checksum mismatch")
    return packed


def _entries(memory: mmap.mmap) -> tuple[list[Any], int]:
    """The entries of the header, and where the arrays begin. Raises ValueError."""
    if len(memory) < _PREFIX.size:
        raise ValueError("the file is too short")
    magic, size, digest = _PREFIX.unpack_from(memory)
    header = memory[_PREFIX.size : _PREFIX.size + size]
    if magic != _MAGIC or hashlib.sha256(header).digest() != digest:
        raise ValueError("checksum mismatch")
    entries: list[Any] = json.loads(header)
    return entries, _aligned(_PREFIX.size + size)


def _digests(arrays: Sequence[npt.NDArray[Any]], threads: int) -> list[str]:
    """SHA-256 of each, in ``threads`` threads (hashing releases the GIL)."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda array: hashlib.sha256(array.data).hexdigest(), arrays))


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
