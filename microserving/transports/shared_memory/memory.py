"""Pool memory: sealed, reserved memfds, and the checks that make mapping another process's memfd safe.

The file of a pool holds the pool's bytes and, from the next memory page on, the lease words.

A memfd has no name and no place in /dev/shm: it is gone when the last process that has it is gone, however it died.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from microserving.errors import StartupError, TransferFailed
from microserving.transports.base import RemotePool
from microserving.transports.lease_words import LEASE_BYTES

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create_pool(nbytes: int) -> int:
    """The file of a pool of ``nbytes`` zero bytes, as ``create_sealed_memory``."""
    if nbytes <= 0:
        raise StartupError(f"transport init failed: a KV pool of {nbytes} bytes was asked for")
    return create_sealed_memory(_leases_at(nbytes) + LEASE_BYTES)


def map_pool(fd: int, nbytes: int, *, inherit: bool) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The pool, uint8 [nbytes], and its lease words, int64 [LEASE_WORDS]; as ``map_memory``."""
    start = _leases_at(nbytes)
    whole = map_memory(fd, start + LEASE_BYTES, inherit=inherit)
    return whole[:nbytes], whole[start:].view(np.int64)


def create_sealed_memory(nbytes: int) -> int:
    """A memfd of ``nbytes`` zero bytes whose size can never change. The caller owns the fd.

    All of its memory is reserved now (0.2 s for 512 MiB), so that no later access can fail with SIGBUS. Raises
    StartupError with the sizes when it does not fit.
    """
    available = available_memory()
    if nbytes > available:
        raise StartupError(_no_room(nbytes, f"only {_mib(available)} MiB of memory are available"))
    fd = os.memfd_create("microserving-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise StartupError(_no_room(nbytes, os.strerror(error.errno or errno.ENOMEM))) from error
    return fd


def map_memory(fd: int, nbytes: int, *, inherit: bool) -> npt.NDArray[np.uint8]:
    """uint8 [nbytes], shared and writable; unmapped when the last reference to the array is gone.

    inherit False: forked children do not get the mapping, so that the end of this process is the end of all writes.
    """
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    if not inherit:
        mapping.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(mapping, dtype=np.uint8)


def map_peer_pool(fd: int, nbytes: int, total_pages: int, page_bytes: int | None) -> RemotePool:
    """Map the pool that a receiver sent us, after checking that what it says of it is true.

    page_bytes: what one page has over all layers here (None = unknown). Raises TransferFailed: a file that its owner
    could shrink under us, or a geometry that does not fit the file, is not mapped.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError:
        raise TransferFailed("the receiver's memory is not a memfd") from None
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise TransferFailed("the receiver's memory is not sealed against resizing")
    if nbytes < 1 or size != _leases_at(nbytes) + LEASE_BYTES:
        raise TransferFailed(f"the receiver announced a pool of {nbytes} bytes and sent a file of {size}")
    if total_pages < 1 or nbytes % total_pages:
        raise TransferFailed(f"the receiver's {nbytes} bytes are not {total_pages} whole pages")
    if page_bytes is not None and nbytes // total_pages != page_bytes:
        raise TransferFailed(
            f"a KV page has {page_bytes} bytes here, {nbytes // total_pages} at the receiver"
        )
    try:
        memory, leases = map_pool(fd, nbytes, inherit=False)
    except (OSError, ValueError, OverflowError):
        raise TransferFailed(f"cannot map the receiver's {_mib(nbytes)} MiB") from None
    return RemotePool(memory, total_pages, leases)


def _leases_at(nbytes: int) -> int:
    """Where the lease words of a pool begin in its file."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def available_memory() -> int:
    """Bytes that this process could still take: what the kernel says, within its control group's limit."""
    fields = Path("/proc/meminfo").read_text(encoding="ascii").split()
    available = int(fields[fields.index("MemAvailable:") + 1]) * 1024
    for folder, limit_file in _CGROUPS:
        try:
            limit = (folder / limit_file).read_text(encoding="ascii").strip()
            statistics = (folder / "memory.stat").read_text(encoding="ascii").split()
        except OSError:
            continue
        if limit.isdecimal():  # not "max"
            used = sum(
                int(value)
                for name, value in zip(statistics[::2], statistics[1::2], strict=False)
                if name in _NOT_RECLAIMABLE
            )
            available = min(available, max(0, int(limit) - used))
    return available


_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
)
"""A container's control group, version 2 and version 1."""
_NOT_RECLAIMABLE = frozenset({"anon", "shmem", "total_rss"})
"""What of a group's memory is not page cache, in the words of both versions."""


def _no_room(nbytes: int, why: str) -> str:
    return f"transport init failed: the KV pool needs {_mib(nbytes)} MiB, {why} (setting kv_cache_bytes)"


def _mib(nbytes: int) -> int:
    return -(-nbytes // 2**20)
