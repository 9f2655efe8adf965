"""Packed weights on disk: made once per model and version, mapped by whoever comes later; damage costs a packing, no start."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from microserving.engine.weights import load_weights, loading, pack_matrix, pack_vector, tile_kind
from microserving.engine.weights.loading import PackedCache, packed_key
from microserving.engine.weights.packed_file import Packed
from tests.engine.random_weights import DENSE, QUANTISED, RandomWeights, small_config

WEIGHTS = RandomWeights(small_config(tied=True), QUANTISED)
OTHER = RandomWeights(small_config(tied=False), DENSE, seed=3)


def load(directory: Path, weights: RandomWeights = WEIGHTS, threads: int = 2) -> Packed:
    return load_weights(weights, directory, threads, lambda _stage, _fraction: None)


def assert_same(found: Packed, expected: Packed) -> None:
    assert found.keys() == expected.keys()
    for name, (array, kind) in expected.items():
        assert found[name].kind == kind
        assert found[name].array.dtype == array.dtype
        np.testing.assert_array_equal(found[name].array, array)


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were packed."""
    made: list[str] = []
    pack = loading.pack_model

    def counted(weights: Any, threads: int, report: Callable[[str, float], None]) -> Packed:
        made.append(weights.model_hash)
        return pack(weights, threads, report)

    monkeypatch.setattr(loading, "pack_model", counted)
    return made


def only_file(directory: Path) -> Path:
    (file,) = (directory / "packed").glob("*.bin")
    return file


@pytest.mark.parametrize("weights", [WEIGHTS, OTHER], ids=["quantised", "dense"])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_array_is_what_packing_one_by_one_gives(
    tmp_path: Path, weights: RandomWeights, threads: int, packings: list[str]
) -> None:
    first, second = load(tmp_path, weights, threads), load(tmp_path, weights, threads)
    assert packings == [weights.model_hash]
    assert_same(second, first)
    prefix = "model.layers.1."
    parts = [weights.weight(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]
    assert first["layers.1.gate_up.tiles"].kind == tile_kind(parts)
    np.testing.assert_array_equal(first["layers.1.gate_up.tiles"].array, pack_matrix(parts))
    norm = pack_vector([weights.weight(f"{prefix}input_layernorm.weight")])
    np.testing.assert_array_equal(first["layers.1.attention_norm"].array, norm)
    assert first["layers.1.attention_norm"].kind is None


def test_what_is_read_is_mapped_and_aligned(tmp_path: Path) -> None:
    """Also on the first start, so that the second engine shares its memory."""
    for packed in (load(tmp_path), load(tmp_path)):
        assert all(weight.array.ctypes.data % 64 == 0 for weight in packed.values())
        assert str(only_file(tmp_path)) in Path("/proc/self/maps").read_text()
        assert all(weight.array.flags.writeable for weight in packed.values())  # a tensor has to be


def test_a_change_of_mapped_weights_stays_in_the_process(tmp_path: Path) -> None:
    load(tmp_path)["embedding.tiles"].array[:] = 0
    assert load(tmp_path)["embedding.tiles"].array.any()


class Damage(NamedTuple):
    name: str
    done: Callable[[bytes], bytes]


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if at else b""


DAMAGES = [
    Damage("empty", lambda _data: b""),
    Damage("magic", flipped(1)),
    Damage("length of the header", lambda data: data[:8] + b"\xff" * 8 + data[16:]),
    Damage("checksum of the header", flipped(20)),
    Damage("header", flipped(60)),
    Damage("an array", lambda data: flipped(len(data) // 2)(data)),
    Damage("the last byte", lambda data: flipped(len(data) - 1)(data)),
    Damage("cut in an array", lambda data: data[: len(data) // 2]),
    Damage("cut in the header", lambda data: data[:100]),
    Damage("cut before the header", lambda data: data[:30]),
    Damage("one byte short", lambda data: data[:-1]),
    Damage("foreign", lambda _data: b"\x7fELF" * 1000),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=[damage.name for damage in DAMAGES])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: Damage, packings: list[str]) -> None:
    expected = load(tmp_path)
    file = only_file(tmp_path)
    expected = {name: weight._replace(array=weight.array.copy()) for name, weight in expected.items()}
    data = file.read_bytes()
    file.unlink()  # not in place: the first load has it mapped
    file.write_bytes(damage.done(data))
    assert_same(load(tmp_path), expected)
    assert_same(load(tmp_path), expected)
    assert len(packings) == 2
    assert file.read_bytes() == data


def test_another_model_has_a_file_of_its_own_and_an_old_version_goes(tmp_path: Path) -> None:
    load(tmp_path)
    old = (tmp_path / "packed") / f"{packed_key(WEIGHTS).partition('-')[0]}-0123456789abcdef.bin"
    old.write_bytes(b"of an older version")
    load(tmp_path, OTHER)
    assert old.exists()
    only = PackedCache(tmp_path, 1).path(packed_key(WEIGHTS))
    only.unlink()
    load(tmp_path)
    assert not old.exists()
    names = {file.name for file in (tmp_path / "packed").glob("*.bin")}
    assert names == {f"{packed_key(WEIGHTS)}.bin", f"{packed_key(OTHER)}.bin"}


def test_engines_that_start_together_pack_once(tmp_path: Path, packings: list[str]) -> None:
    """Locks are per open file, so threads with a cache each stand for processes."""
    started, found = threading.Barrier(3), []

    def start() -> None:
        started.wait()
        found.append(load(tmp_path, threads=1))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packings) == 1
    for packed in found[1:]:
        assert_same(packed, found[0])


_LOAD = """
import sys
from pathlib import Path
from microserving.engine.weights import load_weights
from tests.engine.random_weights import RandomWeights, small_config

packed = load_weights(RandomWeights(small_config(tied=True)), Path(sys.argv[1]), 1, lambda *_progress: None)
print(int(packed["embedding.tiles"].array.sum()), len(packed))
"""


def python(code: str, directory: Path) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, text=True, cwd=root
    )


def test_two_processes_at_once(tmp_path: Path) -> None:
    processes = [python(_LOAD, tmp_path) for _ in range(2)]
    found = [process.communicate(timeout=100)[0] for process in processes]
    packed = load(tmp_path)
    assert found == [f"{packed['embedding.tiles'].array.sum()} {len(packed)}\n"] * 2
    assert [file.suffix for file in (tmp_path / "packed").iterdir()].count(".bin") == 1


def test_a_directory_that_cannot_be_written_costs_a_packing(tmp_path: Path, packings: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert_same(load(tmp_path / "file"), load(tmp_path))
    load(tmp_path / "file")
    assert len(packings) == 3


def test_a_full_disk_costs_a_packing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load(tmp_path / "other")

    def full(file: Any, *_arguments: object) -> None:
        file.write(b"x" * 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loading, "write_packed", full)
    assert_same(load(tmp_path), expected)
    assert "No space left" in caplog.text
    assert [file.suffix for file in (tmp_path / "packed").iterdir()] == [".lock"]


def test_a_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1000, 999, 1))
    load(tmp_path)
    assert not list((tmp_path / "packed").glob("*.bin"))


def test_what_a_killed_start_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    left = tmp_path / "packed" / f".{packed_key(WEIGHTS)}.abcd"
    left.write_bytes(b"half")
    load(tmp_path)
    assert not left.exists()


_START = """
import sys
from pathlib import Path
from microserving.engine.model_runner import TVMModelRunner
from microserving.engine.runner import RunnerChunk
from tests.engine.random_weights import RandomWeights, layout_of, pool_memory, small_config

weights = RandomWeights(small_config(tied=True))
layout = layout_of(weights.config, "float16")
runner = TVMModelRunner.create(
    weights, layout=layout, total_pages=2, pool_memory=pool_memory(layout, 2), threads=1, cache_dir=Path(sys.argv[1])
)
logits = runner.run([RunnerChunk([1, 2, 3], 0, [0], True)]).logits
print(int("tvm" in sys.modules), logits.tobytes().hex())
"""


def test_a_warm_start_imports_no_compiler_and_computes_the_same(tmp_path: Path) -> None:
    def start() -> list[str]:
        return python(_START, tmp_path).communicate(timeout=100)[0].split()

    cold, warm = start(), start()
    assert (cold[0], warm[0]) == ("1", "0")
    assert cold[1] == warm[1]
