"""Reading what llama.cpp writes, and the messages when it is not there. Nothing is built here."""

from __future__ import annotations

import io
import stat
import struct
from pathlib import Path

import pytest

from benchmarks.llama_cpp import PROGRAMS, LlamaCpp, find_or_build, read_logits


def row(step: float, lowest: float, codes: list[int]) -> bytes:
    """A row of 5 log probabilities: lowest + step * code; an odd vocabulary has a word of padding."""
    return struct.pack("<2f5H2x", step, lowest, *codes)


def logits_of(rows: list[bytes]) -> bytes:
    """One window of 6 tokens: rows for positions 3 and 4."""
    return b"_logits_" + struct.pack("<3i", 6, 5, 1) + struct.pack("<6i", 4, 3, 2, 1, 0, 4) + b"".join(rows)


def test_the_likeliest_of_each_row() -> None:
    rows = [row(0.5, -9.0, [1, 2, 65535, 4, 5]), row(0.1, -7.0, [9, 9, 0, 3, 8])]
    tokens, best = read_logits(io.BytesIO(logits_of(rows)))
    assert tokens.tolist() == [[4, 3, 2, 1, 0, 4]]
    assert best.tolist() == [[2, 0]]


@pytest.mark.parametrize("cut", [4, 15, 30, 50])
def test_a_cut_stream_ends_with_a_message(cut: int) -> None:
    whole = logits_of([row(1.0, 0.0, [0, 1, 2, 3, 4])] * 2)
    with pytest.raises(SystemExit, match="ended before"):
        read_logits(io.BytesIO(whole[:cut]))


def program(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_a_folder_without_its_programs_is_refused(tmp_path: Path) -> None:
    program(tmp_path, PROGRAMS[0], "")
    with pytest.raises(SystemExit, match="does not hold all of llama-bench"):
        find_or_build(tmp_path)


def test_without_a_compiler_the_message_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program(tmp_path, "cmake", "")
    with pytest.raises(SystemExit, match=r"needs make and c\+\+.*apt install.*--llama-cpp"):
        find_or_build(None)


def test_programs_are_found_on_the_path_or_in_a_build_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries = tmp_path / "build" / "bin"
    binaries.mkdir(parents=True)
    for name in PROGRAMS:
        program(binaries, name, "")
    assert find_or_build(tmp_path).folder == binaries
    monkeypatch.setenv("PATH", str(binaries))
    assert find_or_build(None).folder == binaries


def test_speeds_come_from_the_programs_json(tmp_path: Path) -> None:
    program(tmp_path, "llama-bench", """echo '[{"avg_ts": 12.5}]'""")
    batched = """echo 'a log line'; echo '{"n_kv_max": 9, "speed_tg": 40.25}'"""
    program(tmp_path, "llama-batched-bench", batched)
    llama = LlamaCpp(tmp_path)
    assert llama.prefill(Path("m"), 512, 2, warm=True) == 12.5
    assert llama.decode_batch(Path("m"), 8, 64, 16, 2) == 40.25


def test_a_failing_program_is_named(tmp_path: Path) -> None:
    program(tmp_path, "llama-bench", "echo no such model >&2; exit 3")
    with pytest.raises(SystemExit, match=r"(?s)llama-bench .* failed with 3:.*no such model"):
        LlamaCpp(tmp_path).prefill(Path("m"), 512, 2, warm=False)
