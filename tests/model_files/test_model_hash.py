"""The fingerprint: same in every process, of everything that matters, bounded for big models."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from microserving.model_files import GGUFWeights, Weight
from microserving.model_files.model_hash import SAMPLE_BYTES, SAMPLES_PER_TENSOR, model_hash
from tests.reference.model_builder import tiny_gguf


def test_another_process_finds_the_same(tmp_path: Path) -> None:
    path = tiny_gguf(kind="q4_1").write(tmp_path / "a.gguf")
    script = (
        "import sys, pathlib; from microserving.model_files import GGUFWeights;"
        "sys.stdout.write(GGUFWeights(pathlib.Path(sys.argv[1])).model_hash)"
    )
    command = [sys.executable, "-c", script, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert found == GGUFWeights(path).model_hash


def test_big_models_are_sampled_at_both_ends(tmp_path: Path) -> None:
    config = GGUFWeights(tiny_gguf().write(tmp_path / "a.gguf")).config
    size = SAMPLE_BYTES * SAMPLES_PER_TENSOR * 4
    base = np.zeros((4, size // 4), np.uint8)

    def digest(changed: int | None) -> str:
        rows = base.copy()
        if changed is not None:
            rows.reshape(-1)[changed] = 1
        return model_hash(config, [Weight("w", "q8_0", (4, 32), rows)], full_bytes=size - 1)

    plain = digest(None)
    assert digest(0) != plain
    assert digest(size - 1) != plain
    assert digest(SAMPLE_BYTES) == plain  # between two samples
    assert model_hash(config, [Weight("w", "q8_0", (4, 32), base)], full_bytes=size) != plain


def test_a_hundred_megabytes_take_less_than_half_a_second(tmp_path: Path) -> None:
    config = GGUFWeights(tiny_gguf().write(tmp_path / "a.gguf")).config
    weights = [Weight("w", "q8_0", (100, 10**6), np.zeros((100, 10**6), np.uint8))]
    best = min(_seconds(lambda: model_hash(config, weights)) for _ in range(3))
    assert best < 0.5


def _seconds(action: object) -> float:
    started = time.process_time()
    assert callable(action)
    action()
    return time.process_time() - started
