"""Unix sockets in a private directory: their place, who may connect, who is at the other end, whether it still lives.

An engine's socket is found by engine id and epoch alone: its name is a hash of both. Paths go through
``/proc/self/fd`` of the opened directory, so that they are short enough for a socket address however long the
directory's own path is, and so that the directory that was checked is the one that is used.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import select
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from microserving.errors import StartupError

_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PREFIX, _SUFFIX = "kv-", ".sock"
HANG_UP = (BrokenPipeError, ConnectionResetError)
"""What a socket call raises when the peer has closed. Any other error says nothing about the peer."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end. pidfd becomes readable when it has ended; the holder of this closes it."""

    uid: int
    pidfd: int


def default_runtime_dir() -> Path:
    """``$XDG_RUNTIME_DIR/microserving-<uid>``, or in ``/tmp`` where there is none."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
    return (base if base.is_dir() else Path("/tmp")) / f"microserving-{os.getuid()}"


def socket_name(engine_id: str, epoch: str) -> str:
    digest = hashlib.sha256(f"{engine_id}\0{epoch}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_PREFIX}{digest[:24]}{_SUFFIX}"


@contextmanager
def private_directory(path: Path) -> Iterator[int]:
    """An fd of the directory, made (mode 0700) if need be. Raises StartupError if it is not ours alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StartupError(f"cannot use the runtime directory {path}: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid():
            raise StartupError(f"the runtime directory {path} belongs to another user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise StartupError(f"the runtime directory {path} is open to other users; it must have mode 0700")
        yield fd
    finally:
        os.close(fd)


def domain(directory: int) -> str:
    """16 hex digits that are the same for this very directory on this host only, by whatever path it was found."""
    status = os.fstat(directory)
    host = _BOOT_ID.read_bytes() if _BOOT_ID.exists() else socket.gethostname().encode()
    return hashlib.sha256(b"%b %d %d" % (host, status.st_dev, status.st_ino)).hexdigest()[:16]


def listen(directory: int, name: str) -> socket.socket:
    """A listening socket ``name`` (mode 0600) in the directory. Removes the sockets of dead engines on the way.

    Raises StartupError when a live engine has this name.
    """
    fcntl.flock(directory, fcntl.LOCK_EX)  # nobody may take a socket that is not listening yet for a dead one
    try:
        remove_dead_sockets(directory)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(listener.fileno(), 0o600)  # before bind: the file never has another mode
            listener.bind(_address(directory, name))
            listener.listen()
        except OSError as error:
            listener.close()
            raise StartupError(f"cannot listen for KV writers: {os.strerror(error.errno or 0)}") from None
        return listener
    finally:
        fcntl.flock(directory, fcntl.LOCK_UN)


def remove_dead_sockets(directory: int) -> None:
    """Unlink every socket of ours that nobody listens on any more."""
    for name in os.listdir(directory):
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
            if probe.connect_ex(_address(directory, name)) == errno.ECONNREFUSED:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)


def connect(directory: int, name: str, timeout_s: float) -> socket.socket:
    """A connected socket whose blocking calls end after ``timeout_s``. Raises OSError."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # A full backlog (a stopped receiver) makes connect wait; only this option bounds it on Unix sockets.
        seconds, fraction = divmod(max(timeout_s, 1e-3), 1.0)
        link.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6))
        )
        link.connect(_address(directory, name))
        link.settimeout(max(timeout_s, 1e-3))
    except OSError:
        link.close()
        raise
    return link


def identify(link: socket.socket) -> Peer:
    """Who is at the other end. Raises OSError when it is gone already."""
    pid, uid, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        return Peer(uid, link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    pidfd = os.pidfd_open(pid)
    if is_ready(link.fileno(), select.POLLHUP):  # the process may have ended and its pid have gone to another
        os.close(pidfd)
        raise ConnectionResetError(errno.ECONNRESET, "the peer is gone")
    return Peer(uid, pidfd)


def is_ready(fd: int, events: int) -> bool:
    """Whether one of ``events`` (select.POLL*) is pending on ``fd`` now."""
    poll = select.poll()
    poll.register(fd, events)
    return any(ready & events for _, ready in poll.poll(0))


def _address(directory: int, name: str) -> str:
    return f"/proc/self/fd/{directory}/{name}"
