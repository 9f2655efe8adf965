"""A directory of files that are made once per key, whoever asks first; what is damaged is made again.

Owns: the lock of a key, atomic writing, the fingerprint of sources. Does not know what is in a file. Nothing that goes
wrong here fails a start: it costs making the contents again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


def fingerprint(parts: Mapping[str, object], sources: Sequence[Path]) -> str:
    """64 hex digits over ``parts`` (JSON-able) and the Python files that ``sources`` are or hold."""
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    files = [file for source in sources for file in ([source] if source.is_file() else source.rglob("*.py"))]
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


class KeptFiles(Generic[T]):
    """Files of one kind under ``directory``. Safe for several processes at once. ``builds`` counts what was made.

    what: the contents in words, for warnings.
    read(path): raises OSError or ValueError for a file that is not what ``write`` made.
    """

    def __init__(
        self,
        directory: Path,
        what: str,
        read: Callable[[Path], T],
        write: Callable[[IO[bytes], T], object],
    ) -> None:
        self._directory, self._what, self._read_file, self._write_file = directory, what, read, write
        self.builds = 0

    def path(self, key: str) -> Path:
        """Where the contents of ``key`` are kept."""
        return self._directory / f"{key}.bin"

    def get(self, key: str, build: Callable[[], T]) -> T:
        """The contents of ``key``: read, or built under the key's lock, kept, and read where that was possible.

        Raises what ``build`` raises. A directory that cannot be written to costs the build every time, no more.
        """
        found = self._read(key)
        if found is not None:
            return found
        with self._lock(key):
            found = self._read(key)  # another process may have made it while we waited
            if found is not None:
                return found
            built = build()
            self.builds += 1
            kept = self._write(key, built)
        return (self._read(key) if kept else None) or built

    def _read(self, key: str) -> T | None:
        try:
            return self._read_file(self.path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s of key %s cannot be used (%s): made again", self._what, key, error)
            return None

    def _write(self, key: str, contents: T) -> bool:
        """Whether it is kept. Nothing is left of a write that fails, as on a full disk, or that was killed before."""
        temporary = None
        try:
            self._remove_remains(key)
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=f".{key}.", delete=False) as file:
                temporary = Path(file.name)
                self._write_file(file.file, contents)
            temporary.replace(self.path(key))
            return True
        except OSError as error:
            logger.warning("%s cannot be kept (%s): the next start makes it again", self._what, error)
            return False
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)

    def _remove_remains(self, key: str) -> None:
        """The lock is ours: whoever was writing this key is dead."""
        for file in self._directory.glob(f".{key}.*"):
            file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            file = (self._directory / f"{key}.lock").open("w")
        except OSError:
            yield  # nothing can be kept here, so there is nothing to guard
            return
        with file:
            with contextlib.suppress(OSError):  # a file system without locks: both make it, one is kept
                fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
            yield
