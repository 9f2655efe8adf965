"""A directory of compiled models: made once per key, whoever asks first; what is damaged is made again.

Owns: the file format (a checksum, then the objects), the lock, the key. Does not know how code is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

logger = logging.getLogger(__name__)

_MAGIC = b"MSVCODE1"
_CODE_PACKAGES = ("apache-tvm", "apache-tvm-ffi-orcjit")


def cache_key(parts: Mapping[str, object], sources: Sequence[Path]) -> str:
    """32 hex digits over ``parts`` (JSON-able), the Python files under ``sources`` and the compiler's versions."""
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for package in _CODE_PACKAGES:
        digest.update(f"{package}={version(package)};".encode())
    for file in sorted(file for source in sources for file in source.rglob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:32]


class CodeCache:
    """Compiled objects under ``directory/code``. Safe for several processes at once. ``builds`` counts what was made."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "code"
        self.builds = 0

    def get(self, key: str, build: Callable[[], tuple[bytes, ...]]) -> tuple[bytes, ...]:
        """The objects of ``key``: read, or built under the key's lock and kept. A directory that cannot be written to
        costs the build every time, no more."""
        found = self._read(key)
        if found is not None:
            return found
        with self._lock(key):
            found = self._read(key)  # another process may have made it while we waited
            if found is None:
                found = build()
                self.builds += 1
                self._write(key, found)
        return found

    def path(self, key: str) -> Path:
        """Where the objects of ``key`` are kept."""
        return self._directory / f"{key}.bin"

    def _read(self, key: str) -> tuple[bytes, ...] | None:
        try:
            return _decode(self.path(key).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("compiled code of key %s is unusable (%s); compiling it again", key, error)
            return None

    def _write(self, key: str, objects: tuple[bytes, ...]) -> None:
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=f".{key}.", delete=False) as file:
                temporary = Path(file.name)
                file.write(_encode(objects))
            temporary.replace(self.path(key))
        except OSError as error:
            logger.warning("compiled code cannot be kept (%s); the next start compiles it again", error)

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = (self._directory / f"{key}.lock").open("w")
        except OSError:
            yield  # nothing can be kept here, so there is nothing to guard
            return
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
            yield


def _encode(objects: tuple[bytes, ...]) -> bytes:
    body = struct.pack("<I", len(objects)) + b"".join(struct.pack("<Q", len(item)) + item for item in objects)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes) -> tuple[bytes, ...]:
    """Raises ValueError when ``data`` is not what ``_encode`` made."""
    start = len(_MAGIC) + 32
    digest, body = data[len(_MAGIC) : start], data[start:]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != digest:
        raise ValueError("checksum mismatch")
    (count,) = struct.unpack_from("<I", body)
    objects, offset = [], 4
    for _ in range(count):
        (size,) = struct.unpack_from("<Q", body, offset)
        offset += 8
        objects.append(body[offset : offset + size])
        offset += size
    return tuple(objects)
