"""Qwen2 and Qwen3 in both file formats: biases and head norms under their names, q and k rows as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from microserving.errors import ModelLoadError
from microserving.model_files import GGUFWeights, HFWeights, tensor_shapes
from microserving.model_files.model_config import config_from_hf
from tests.reference.model_builder import (
    RawTensor,
    TinyShape,
    tiny_arrays,
    tiny_gguf,
    tiny_hf_config,
    write_tiny_hf,
)

ARCHITECTURES = [("qwen2", True, False), ("qwen3", False, True)]


@pytest.mark.parametrize(("architecture", "bias", "qk_norm"), ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_both_formats_hold_the_same_model(
    architecture: str, bias: bool, qk_norm: bool, tied: bool, tmp_path: Path
) -> None:
    gguf = GGUFWeights(tiny_gguf(architecture=architecture, tied=tied).write(tmp_path / "a.gguf"))
    directory = HFWeights(write_tiny_hf(tmp_path / "a", architecture=architecture, tied=tied))
    arrays = tiny_arrays(TinyShape(), architecture=architecture, tied=tied)
    for source in (gguf, directory):
        config = source.config
        found = (config.architecture, config.attention_bias, config.qk_norm, config.tie_word_embeddings)
        assert found == (architecture, bias, qk_norm, tied)
        assert set(source.names()) == set(arrays) == set(tensor_shapes(config))
        for name, values in arrays.items():
            np.testing.assert_array_equal(source.weight(name).dequantize(), values, strict=True)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "blk.0.attn_q.bias"),
        ("llama", "blk.0.attn_q_norm.weight"),
        ("qwen2", "blk.0.attn_output.bias"),
        ("qwen3", "blk.0.attn_k.bias"),
        ("qwen2", "blk.0.attn_norm.bias"),
    ],
)
def test_a_tensor_of_another_architecture_is_refused(architecture: str, name: str, tmp_path: Path) -> None:
    file = tiny_gguf(architecture=architecture)
    file.tensors[name] = RawTensor("f32", (64,), b"\0" * 256)
    with pytest.raises(ModelLoadError, match=f"is not part of a {architecture} model"):
        GGUFWeights(file.write(tmp_path / "a.gguf"))


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    file = tiny_gguf(architecture="qwen2")
    del file.tensors["blk.1.attn_v.bias"]
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.1\.self_attn\.v_proj\.bias' is missing"):
        GGUFWeights(file.write(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("more", "context"),
    [
        ({"sliding_window": 32}, 128),
        ({"sliding_window": 32, "use_sliding_window": False}, 128),
        ({"sliding_window": 32, "use_sliding_window": True}, 32),
        ({"sliding_window": None, "use_sliding_window": True}, 128),
    ],
)
def test_a_window_counts_only_when_it_is_used(more: dict[str, Any], context: int) -> None:
    """Qwen2.5's config.json names a window and says that it is off."""
    document = {**tiny_hf_config(architecture="qwen2"), **more}
    assert config_from_hf(document, fallback_name="x").max_context == context
    mistral = {**tiny_hf_config(), "architectures": ["MistralForCausalLM"], "sliding_window": 32}
    assert config_from_hf(mistral, fallback_name="x").max_context == 32


def test_a_qwen3_config_without_a_head_size_means_128() -> None:
    """Qwen3Config's default; the hidden size says nothing about it."""
    document = tiny_hf_config(architecture="qwen3")
    del document["head_dim"]
    assert config_from_hf(document, fallback_name="x").head_dim == 128
