"""Compiled models on disk. Owns: the file format (a checksum, then the objects) and the key; not how code is made."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO

from microserving.engine.kept_files import KeptFiles, fingerprint
from microserving.engine.tvm_runtime import Objects

_MAGIC = b"MSVCODE1"
_CODE_PACKAGES = ("apache-tvm", "apache-tvm-ffi-orcjit")


def cache_key(parts: Mapping[str, object], sources: Sequence[Path]) -> str:
    """32 hex digits over ``parts`` (JSON-able), the Python files under ``sources`` and the compiler's versions."""
    versions = {package: version(package) for package in _CODE_PACKAGES}
    return fingerprint({"parts": parts, "versions": versions}, sources)[:32]


class CodeCache(KeptFiles[Objects]):
    """Compiled objects under ``directory/code``."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "code", "compiled code", _read, _write)


def _read(path: Path) -> Objects:
    return _decode(path.read_bytes())


def _write(file: IO[bytes], objects: Objects) -> None:
    file.write(_encode(objects))


def _encode(objects: Objects) -> bytes:
    body = struct.pack("<I", len(objects)) + b"".join(struct.pack("<Q", len(item)) + item for item in objects)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(data: bytes) -> Objects:
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
