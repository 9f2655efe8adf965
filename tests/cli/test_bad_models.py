"""`microserving serve` with every kind of bad model: exit status 1 and one line that names the file and the problem."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.targets import SHAPE, tokenizer_document, vocabulary_pairs
from tests.reference.model_builder import tiny_gguf, write_tiny_hf


def _no_tokenizer(place: Path) -> Path:
    return write_tiny_hf(place / "m")


def _bad_tokenizer(place: Path) -> Path:
    directory = write_tiny_hf(place / "m")
    (directory / "tokenizer.json").write_text('{"model": 3}')
    return directory


def _panicking_tokenizer(place: Path) -> Path:
    directory = write_tiny_hf(place / "m")
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (directory / "tokenizer.json").write_text(
        json.dumps({**tokenizer_document("gpt2"), "normalizer": broken})
    )
    return directory


def _cut_gguf(place: Path) -> Path:
    path = place / "m.gguf"
    path.write_bytes(tiny_gguf(SHAPE, pairs=vocabulary_pairs("gpt2")).to_bytes()[:-100])
    return path


def _other_file(place: Path) -> Path:
    (place / "m.gguf").write_text("hello\n" * 100)
    return place / "m.gguf"


def _empty_file(place: Path) -> Path:
    (place / "m.gguf").touch()
    return place / "m.gguf"


def _no_weights(place: Path) -> Path:
    directory = write_tiny_hf(place / "m")
    (directory / "model.safetensors").unlink()
    return directory


def _cut_safetensors(place: Path) -> Path:
    directory = write_tiny_hf(place / "m")
    os.truncate(directory / "model.safetensors", 5000)
    return directory


def _bad_config(place: Path) -> Path:
    directory = write_tiny_hf(place / "m")
    (directory / "config.json").write_text("{")
    return directory


def _not_finite(place: Path) -> Path:
    file = tiny_gguf(SHAPE, pairs=vocabulary_pairs("gpt2"))
    file.tensors["output_norm.weight"].data = b"\xff" * len(file.tensors["output_norm.weight"].data)
    return file.write(place / "m.gguf")


@pytest.mark.case("LD-01", "LD-09", "LD-11")
@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda place: place / "absent.gguf", "absent.gguf' was not found"),
        (lambda place: place, "was not found"),
        (_empty_file, "m.gguf: the file is empty"),
        (_other_file, "m.gguf: not a GGUF file"),
        (_cut_gguf, "m.gguf: the file is cut or damaged: expected"),
        (_not_finite, "tensor 'model.norm.weight' holds a number that is not finite"),
        (_no_weights, "there is neither model.safetensors nor"),
        (_cut_safetensors, "model.safetensors: the file is cut or damaged: expected"),
        (_bad_config, "config.json: not valid JSON"),
        (_no_tokenizer, "there is no tokenizer.json"),
        (_bad_tokenizer, "tokenizer.json: not a tokenizer that can be used"),
        (_panicking_tokenizer, "tokenizer.json: not a tokenizer that can be used"),
    ],
)
def test_one_line_says_why(make: Any, part: str, run: Any, tmp_path: Path) -> None:
    ran = run("serve", "--model", str(make(tmp_path)), "--port", "0", "--cache-dir", str(tmp_path / "cache"))
    assert (ran.status, ran.out) == (1, "")
    assert "Traceback" not in ran.err
    problems = [line for line in ran.err.splitlines() if part in line]
    assert len(problems) == 1, ran.err
    assert ran.err.splitlines()[-1] == problems[0]
    assert str(tmp_path) in problems[0]
