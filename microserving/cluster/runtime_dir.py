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
ADMIN_SOCKET = "admin.sock"
"""Where the router of the cluster has its admin routes."""
PROGRAM_STATE = "program-state.json"
"""Where the router of the cluster remembers what was deployed, until the cluster ends."""
_CARD = "cluster"


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


def admin_sockets(base: Path | None = None) -> list[Path]:
    """The admin sockets of this user's clusters that run now, sorted."""
    base = default_base() if base is None else base
    found = [path for path in base.glob(f"{_PREFIX}*/{ADMIN_SOCKET}") if path.is_socket()]
    return sorted(path for path in found if _is_ours(path.parent) and not _is_stale(path.parent))


def write_card(directory: Path, name: str, url: str) -> None:
    """Tell others of this user which cluster ``directory`` belongs to."""
    (directory / _CARD).write_text(f"{name} at {url}", encoding="utf-8")


def card_of(socket: Path) -> str | None:
    """`NAME at URL` of the cluster with this admin socket; None while it does not tell yet."""
    try:
        return (socket.parent / _CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


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
    if not _is_ours(path):
        return False
    try:
        with (path / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False


def _is_ours(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
