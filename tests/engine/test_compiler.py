"""The code cache: one build per key whoever asks, and damage costs a build, never a start."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from microserving.engine.compiler import CodeCache, cache_key

OBJECTS = (b"names", b"\x7fELF" + bytes(range(256)), b"")


def make(calls: list[int]) -> tuple[bytes, ...]:
    calls.append(1)
    return OBJECTS


def test_a_second_cache_reads_what_the_first_made(tmp_path: Path) -> None:
    calls: list[int] = []
    first, second = CodeCache(tmp_path), CodeCache(tmp_path)
    assert first.get("k", lambda: make(calls)) == OBJECTS
    assert second.get("k", lambda: make(calls)) == OBJECTS
    assert (len(calls), first.builds, second.builds) == (1, 1, 0)
    assert second.get("other", lambda: make(calls)) == OBJECTS
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "foreign"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    cache, calls = CodeCache(tmp_path), []  # type: ignore[var-annotated]
    cache.get("k", lambda: make(calls))
    file = cache.path("k")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(
        {"empty": b"", "cut": data[:50], "flipped": bytes(data), "foreign": b"\x7fELF" * 99}[damage]
    )
    assert cache.get("k", lambda: make(calls)) == OBJECTS
    assert cache.get("k", lambda: make(calls)) == OBJECTS
    assert len(calls) == 2


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    """Locks are per open file, so threads with a cache each stand for processes."""
    calls: list[int] = []
    started, found = threading.Barrier(4), []

    def start() -> None:
        started.wait()
        found.append(CodeCache(tmp_path).get("k", lambda: make(calls)))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [OBJECTS] * 4
    assert len(calls) == 1


def test_a_build_that_fails_leaves_nothing_and_frees_the_lock(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path)

    def fail() -> tuple[bytes, ...]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.get("k", fail)
    assert not cache.path("k").exists()
    assert cache.get("k", lambda: OBJECTS) == OBJECTS


def test_a_directory_that_cannot_be_made_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CodeCache(tmp_path / "file")
    assert cache.get("k", lambda: OBJECTS) == OBJECTS
    assert cache.get("k", lambda: OBJECTS) == OBJECTS
    assert cache.builds == 2


def test_the_key_depends_on_parts_and_sources(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("one")
    key = cache_key({"a": 1, "b": [2]}, [tmp_path])
    assert key == cache_key({"b": [2], "a": 1}, [tmp_path])
    assert key != cache_key({"a": 2, "b": [2]}, [tmp_path])
    source.write_text("two")
    assert key != cache_key({"a": 1, "b": [2]}, [tmp_path])


def test_a_full_disk_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: object, _objects: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = CodeCache(tmp_path)
    monkeypatch.setattr(cache, "_write_file", full)
    assert cache.get("k", lambda: OBJECTS) == OBJECTS
    assert [file.name for file in (tmp_path / "code").iterdir()] == ["k.lock"]
