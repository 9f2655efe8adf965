"""A file mapped read-only into memory, and bounded JSON files beside it. Knows no format."""

from __future__ import annotations

import json
import mmap
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from microserving.errors import ModelLoadError

MAX_JSON_BYTES = 32 * 2**20
"""Parsed JSON may take over twenty times as much."""


class MappedFile:
    """The map lives as long as this object or a view of it. Raises ModelLoadError when the file cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            require_regular(path)
            with path.open("rb") as file:
                if file.seek(0, 2) == 0:
                    raise ModelLoadError("the file is empty: expected some bytes, found 0")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot be read: {_reason(error)}") from None
        self.size = len(self._map)

    def head(self) -> memoryview:
        """All bytes, for parsing a header; must not be kept."""
        return memoryview(self._map)

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Read-only uint8 [nbytes], no copy.

        Raises ModelLoadError when the file was cut after it was opened: touching the missing part would kill the
        process with SIGBUS.
        """
        now = self._map.size()
        if now < self.size:
            raise ModelLoadError(f"{self.path}: the file was cut: expected {self.size} bytes, found {now}")
        return np.frombuffer(self._map, np.uint8, nbytes, offset)


def require_regular(path: Path) -> None:
    """Raises ModelLoadError for a pipe, a device or a directory: opening one may wait for ever. OSError as ``stat``."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ModelLoadError("cannot be read: it is not a file")


def read_bytes(path: Path, limit: int) -> bytes:
    """All of a file of at most ``limit`` bytes; raises ModelLoadError that names it."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {_reason(error)}") from None
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error.message}") from None
    if len(data) > limit:
        raise ModelLoadError(f"{path}: the file is larger than {limit} bytes")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of at most MAX_JSON_BYTES; raises ModelLoadError that names the file."""
    data = read_bytes(path, MAX_JSON_BYTES)
    try:
        return parse_object(data)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error.message}") from None


def parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object in which no key occurs twice; raises ModelLoadError."""
    try:
        document = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ModelLoadError(f"a JSON object is expected, not {type(document).__name__}")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ModelLoadError(f"the key {twice!r} occurs twice")
    return document


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
