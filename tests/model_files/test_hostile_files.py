"""Files that are well formed and still wrong: each kind of fault that damaged files have shown, by name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from microserving.engine.weights.packing import pack_matrix, pack_vector
from microserving.errors import MAX_LOAD_ERROR_CHARS, ModelLoadError
from microserving.model_files import HFWeights, open_model
from microserving.model_files.mapped_file import parse_object
from tests.reference.model_builder import TinyShape, tiny_arrays, tiny_gguf, tiny_hf_config, write_tiny_hf


def refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        open_model(str(path))
    return str(caught.value)


def test_an_error_is_one_short_line_whatever_the_file_says() -> None:
    error = ModelLoadError("a\nb\x1b[31m\u2028" + "x" * 100_000 + "the end")
    assert error.message.isprintable()
    assert error.message.startswith("a\\nb\\x1b[31m\\u2028xx")
    assert error.message.endswith("the end")
    assert len(error.message) < MAX_LOAD_ERROR_CHARS + 50
    assert ModelLoadError("tensor 'é' 模型").message == "tensor 'é' 模型"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "m")
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.") + ".*it is not a file"):
        HFWeights(directory)


def test_a_key_that_is_there_twice_among_many() -> None:
    keys = [*(f'"k{i}":1' for i in range(300_000)), '"twice":1', '"twice":2']
    with pytest.raises(ModelLoadError, match="'twice' occurs twice"):
        parse_object(f"{{{','.join(keys)}}}".encode())


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ([2**63, 0], "below 2"),
        ([10**4000] * 8, "below 2"),
        ([1] * 9, "9 dimensions; at most 8"),
        ([2**62] * 100_000, "100000 dimensions"),
    ],
    ids=["2^63", "digits", "nine", "many"],
)
def test_sizes_that_would_take_long_to_multiply(shape: list[int], part: str, tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "m")
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}
    text = json.dumps({"t": entry}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    message = refused(directory)
    assert "tensor 't'" in message
    assert part in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"rope_theta": 10**400}, "'rope_theta' is too large a number"),
        ({"rope_theta": 1e-30}, "rope_theta is 1e-30"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rms_norm_eps": 1e-40}, "rms_norm_eps is 1e-40"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"num_attention_heads": -4}, "num_heads is -4"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight' is missing"),
        ({"vocab_size": 299}, "'model.embed_tokens.weight' has shape (300, 64), not (299, 64)"),
        ({"vocab_size": 301}, "'model.embed_tokens.weight' has shape (300, 64), not (301, 64)"),
        ({"max_position_embeddings": 0}, "max_context is 0"),
        ({"max_position_embeddings": 2**40}, "max_context is"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_no_engine_could_run(change: dict[str, Any], part: str, tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "m")
    (directory / "config.json").write_text(json.dumps({**tiny_hf_config(), **change}))
    assert part in refused(directory)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_a_weight_that_is_not_finite_is_named(kind: str, name: str, value: float, tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "m", kind=kind)
    place = HFWeights(directory)._tensors[name][1]
    raw = bytearray((directory / "model.safetensors").read_bytes())
    bits = (
        np.float32(value).tobytes()[2:]
        if kind == "bf16"
        else np.array(value, kind.replace("f", "<f")[:2] + str(int(kind[1:]) // 8)).tobytes()
    )
    raw[place.offset : place.offset + len(bits)] = bits
    (directory / "model.safetensors").write_bytes(raw)
    weight = HFWeights(directory).weight(name)
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' holds a number that is not finite"):
        (pack_vector if len(weight.shape) == 1 else pack_matrix)([weight])


def test_the_matrices_of_the_model_are_found_finite() -> None:
    assert all(np.isfinite(values).all() for values in tiny_arrays(TinyShape()).values())


@pytest.mark.parametrize("architecture", [b"x" * 300_000, b"a\nb", b"\x1b[31m"])
def test_a_name_from_the_file_is_quoted(architecture: bytes, tmp_path: Path) -> None:
    file = tiny_gguf(pairs={"general.architecture": ("STRING", architecture)})
    message = refused(file.write(tmp_path / "m.gguf"))
    assert message.isprintable()
    assert "is not supported" in message
    assert "m.gguf" in message
