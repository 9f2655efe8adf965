"""The private directory of one running cluster: sockets, secret, logs (mode 0700).

It is removed when the launcher ends. A launcher that was killed leaves its directory behind; the next one finds that
nobody holds its lock any more, and removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from microserving.errors import StartupError

_PREFIX = "microserving-up-"
_LOCK = "lock"


@contextmanager
def runtime_dir(base: Path | None = None) -> Iterator[Path]:
    """A fresh directory in ``base`` (default: XDG_RUNTIME_DIR, else the temporary directory), removed at the end.

    The path is kept short, because a Unix socket's path may be only 107 bytes long.
    """
    base = default_base() if base is None else base
    try:
        _remove_stale(base)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    except OSError as error:
        raise StartupError(f"cannot make a runtime directory in {base}: {error.strerror}") from error
    try:
        with (path / f"{_LOCK}.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (path / f"{_LOCK}.new").rename(path / _LOCK)  # held before another launcher can see it
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def default_base() -> Path:
    """XDG_RUNTIME_DIR when it is a writable directory, else the temporary directory."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    if named and os.access(named, os.W_OK | os.X_OK):
        return Path(named)
    return Path(tempfile.gettempdir())


def _remove_stale(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        if _is_stale(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_stale(path: Path) -> bool:
    """Whether ``path`` is ours (this user's, with a lock file) and its launcher is gone."""
    try:
        info = path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            return False
        with (path / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False
