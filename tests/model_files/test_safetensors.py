"""Safetensors files and Hugging Face directories: what is read, and that nothing damaged or crafted is."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from microserving.errors import ModelLoadError
from microserving.model_files import HFWeights, WeightSource, tensor_shapes
from microserving.model_files.safetensors import MAX_HEADER_BYTES, SafetensorsFile
from tests.reference.model_builder import (
    TinyShape,
    safetensors_bytes,
    tiny_arrays,
    tiny_hf_config,
    tiny_tensors,
    write_tiny_hf,
)


def refuse(raw: bytes, directory: Path) -> str:
    path = directory / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError) as caught:
        SafetensorsFile(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_is_read(shards: int, tied: bool, tmp_path: Path) -> None:
    source: WeightSource = HFWeights(write_tiny_hf(tmp_path / "tiny", shards=shards, tied=tied))
    arrays = tiny_arrays(TinyShape(), tied=tied)
    assert source.config.name == "tiny"
    assert set(source.names()) == set(arrays) == set(tensor_shapes(source.config))
    for name, values in arrays.items():
        np.testing.assert_array_equal(source.weight(name).dequantize(), values, strict=True)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    np.testing.assert_array_equal(source.weight("lm_head.weight").dequantize(), arrays[head])


def test_shards_do_not_change_the_hash(tmp_path: Path) -> None:
    hashes = {HFWeights(write_tiny_hf(tmp_path / str(n), shards=n)).model_hash for n in (1, 2, 3)}
    assert len(hashes) == 1


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_precision(kind: str, tmp_path: Path) -> None:
    source = HFWeights(write_tiny_hf(tmp_path, kind=kind))
    for name, values in tiny_arrays(TinyShape()).items():
        assert source.weight(name).kind == kind
        np.testing.assert_allclose(source.weight(name).dequantize(), values, rtol=1e-2, atol=1e-6)


def test_a_copy_of_the_tied_head_and_old_rope_tables_are_ignored(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["lm_head.weight"] = ("F32", (300, 64), b"\1" * 300 * 64 * 4)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (8,), b"\0" * 32)
    write_tiny_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    source = HFWeights(tmp_path)
    assert "lm_head.weight" not in source.names()
    assert source.weight("lm_head.weight").name == "model.embed_tokens.weight"


@pytest.mark.case("LD-09")
@pytest.mark.parametrize("length", [0, 7, 100_000_001, 2**63, 2**64 - 1, 1000])
def test_a_false_header_length(length: int, tmp_path: Path) -> None:
    refuse(struct.pack("<Q", length) + b"{}      ", tmp_path)


@pytest.mark.case("LD-09")
def test_the_header_limit_is_documented_in_the_message(tmp_path: Path) -> None:
    message = refuse(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", tmp_path)
    assert f"at most {MAX_HEADER_BYTES}" in message
    assert "several shards" in message


@pytest.mark.case("LD-09")
def test_a_million_tensors_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    item = '"%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join([item % i for i in range(1_000_000)]) + "}").encode()
    raw = with_header(text)
    started = time.process_time()
    assert "at most" in refuse(raw, tmp_path)
    assert time.process_time() - started < 1


@pytest.mark.case("LD-09")
@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (with_header(b"nonsense"), "not valid JSON"),
        (with_header(b"\xff\xff"), "not valid JSON"),
        (with_header(b"[" * 100_000), "not valid JSON"),
        (with_header([1, 2]), "JSON object is expected, not list"),
        (with_header(b'{"a":1,"a":2}'), "'a' occurs twice"),
        (with_header({"t": 3}), "exactly dtype, shape and data_offsets"),
        (with_header(one(extra=1), b"\0" * 8), "exactly dtype, shape and data_offsets"),
        (with_header(one(dtype="F8_E4M3"), b"\0" * 8), "tensor 't' has type F8_E4M3, which is not supported"),
        (with_header(one(shape=[2, -1]), b"\0" * 8), "non-negative integers"),
        (with_header(one(shape=[True, 2]), b"\0" * 8), "non-negative integers"),
        (with_header(one(shape="2"), b"\0" * 8), "non-negative integers"),
        (with_header(one(offsets=[0]), b"\0" * 8), "needs 8 bytes"),
        (with_header(one(offsets=[8, 0]), b"\0" * 8), "needs 8 bytes"),
        (with_header(one(shape=[2**62, 2**62]), b"\0" * 8), "needs"),
        (with_header(one(offsets=[1, 9]), b"\0" * 9), "the next free one"),
        (
            with_header({**one(), "u": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"\0" * 12),
            "next free",
        ),
        (
            with_header(one(), b"\0" * 8 + b"junk"),
            f"expected {len(with_header(one())) + 8} bytes, found {len(with_header(one())) + 12}",
        ),
        (
            with_header(one(), b"\0" * 7),
            f"expected {len(with_header(one())) + 8} bytes, found {len(with_header(one())) + 7}",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_files(raw: bytes, part: str, tmp_path: Path) -> None:
    assert part in refuse(raw, tmp_path)


@pytest.mark.case("LD-11")
def test_a_file_cut_anywhere_says_how_much_is_missing(tmp_path: Path) -> None:
    whole = safetensors_bytes(tiny_tensors())
    for part in range(50):
        cut = len(whole) * part // 50
        message = refuse(whole[:cut], tmp_path)
        assert "expected" in message
        assert f"found {cut}" in message


@pytest.mark.case("LD-11")
def test_a_file_cut_after_opening_is_an_error_not_a_signal(tmp_path: Path) -> None:
    source = HFWeights(write_tiny_hf(tmp_path))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ModelLoadError, match="found 100"):
        source.weight("model.norm.weight")


def refuse_directory(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        HFWeights(directory)
    assert str(directory) in str(caught.value)
    return str(caught.value)


@pytest.mark.case("LD-09")
@pytest.mark.parametrize(
    "shard",
    [
        "../other.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "..",
        "",
        "..safetensors/../x.safetensors",
        "a\\b",
        "a\0b",
        3,
    ],
)
def test_an_index_cannot_leave_the_directory(shard: Any, tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(document))
    assert "is not a file name inside the directory" in refuse_directory(tmp_path)


@pytest.mark.case("LD-09")
def test_a_missing_shard_and_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.unlink()
    assert second.name in refuse_directory(tmp_path)
    second.write_bytes(safetensors_bytes(tiny_tensors()))
    assert "is in two shards" in refuse_directory(tmp_path)
    second.write_bytes(whole)
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    name = next(name for name, shard in document["weight_map"].items() if shard == second.name)
    document["weight_map"][name] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(document))
    assert f"{name!r} is not in shard" in refuse_directory(tmp_path)
    index.write_text('{"weight_map": []}')
    assert "'weight_map' must be an object" in refuse_directory(tmp_path)


def test_a_directory_without_weights_or_config(tmp_path: Path) -> None:
    assert "config.json" in refuse_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
    assert "neither model.safetensors nor model.safetensors.index.json" in refuse_directory(tmp_path)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is not supported"),
        ({"architectures": []}, "'architectures' must be a list of one name"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope scaling 'llama3' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": 3}, "'rope_scaling' must be an object, not int"),
        ({"hidden_size": "64"}, "'hidden_size' must be an integer, not str"),
        ({"hidden_size": True}, "'hidden_size' must be an integer, not bool"),
        ({"hidden_size": 2**70}, "hidden_size is"),
        ({"rms_norm_eps": "x"}, "'rms_norm_eps' must be a number, not str"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' must be true or false"),
        ({"attention_bias": True}, "attention_bias = true is not supported"),
        ({"mlp_bias": True}, "mlp_bias = true is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' must be an integer, not NoneType"),
    ],
)
def test_configs_that_cannot_run_are_refused_by_name(
    change: dict[str, Any], part: str, tmp_path: Path
) -> None:
    write_tiny_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**tiny_hf_config(), **change}))
    assert part in refuse_directory(tmp_path)


def test_config_variants_that_mean_the_same(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    plain = HFWeights(tmp_path).config
    newer = tiny_hf_config()
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": newer.pop("rope_theta")}
    newer["architectures"] = ["MistralForCausalLM"]
    newer["rope_scaling"] = newer["attention_bias"] = newer["sliding_window"] = None
    (tmp_path / "config.json").write_text(json.dumps(newer))
    assert HFWeights(tmp_path).config == plain


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**tiny_hf_config(), "sliding_window": 50}))
    assert HFWeights(tmp_path).config.max_context == 50
