"""A GGUF model as a WeightSource: names, order of rows, shapes, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from microserving.errors import ModelLoadError
from microserving.model_files import GGUFWeights, HFWeights, WeightSource, tensor_shapes
from tests.reference.llama_numpy import ReferenceLlama
from tests.reference.model_builder import RawTensor, TinyShape, tiny_arrays, tiny_gguf, write_tiny_hf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_comes_back_in_neox_order(tied: bool, path: Path) -> None:
    source: WeightSource = GGUFWeights(tiny_gguf(tied=tied).write(path))
    arrays = tiny_arrays(TinyShape(), tied=tied)
    assert set(source.names()) == set(arrays)
    assert {name: source.weight(name).shape for name in source.names()} == tensor_shapes(source.config)
    for name, values in arrays.items():
        np.testing.assert_array_equal(source.weight(name).dequantize(), values, strict=True)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    np.testing.assert_array_equal(source.weight("lm_head.weight").dequantize(), arrays[head])


@pytest.mark.parametrize(
    ("kind", "error"), [("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 0.01), ("q4_0", 0.1), ("q4_1", 0.08)]
)
def test_other_kinds_are_close_to_what_was_written(kind: str, error: float, path: Path) -> None:
    source = GGUFWeights(tiny_gguf(kind=kind).write(path))
    for name, values in tiny_arrays(TinyShape()).items():
        weight = source.weight(name)
        assert weight.kind == ("f32" if values.ndim == 1 else kind)
        assert np.abs(weight.dequantize() - values).max() <= error * max(1.0, float(np.abs(values).max()))


def test_tensors_are_not_copied_but_for_q_and_k(path: Path) -> None:
    source = GGUFWeights(tiny_gguf(kind="q4_1").write(path))
    for name in source.names():
        rows = source.weight(name).rows
        assert not rows.flags.writeable
        copied = name.endswith(("q_proj.weight", "k_proj.weight"))
        assert np.shares_memory(rows, source.weight(name).rows) != copied


def test_the_config(path: Path) -> None:
    config = GGUFWeights(tiny_gguf().write(path)).config
    assert (config.architecture, config.name, config.num_layers) == ("llama", "tiny", 2)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 300)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.max_context, config.rope_theta, config.tie_word_embeddings) == (128, 10000.0, True)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert (config.attention_bias, config.qk_norm) == (False, False)


@pytest.mark.parametrize(
    ("pairs", "part"),
    [
        ({"general.architecture": ("STRING", "mamba")}, "architecture 'mamba' is not supported"),
        ({"general.architecture": ("UINT32", 3)}, "'general.architecture' has type UINT32, not STRING"),
        ({"llama.rope.scaling.type": ("STRING", "yarn")}, "rope scaling 'yarn' is not supported"),
        ({"llama.rope.scale_linear": ("FLOAT32", 2.0)}, "rope scaling 'linear' is not supported"),
        ({"llama.expert_count": ("UINT32", 8)}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": ("UINT32", 8)}, "rope.dimension_count is 8"),
        ({"llama.attention.value_length": ("UINT32", 8)}, "value_length is 8"),
        ({"llama.attention.head_count": ("UINT32", 0)}, "num_heads is 0"),
        (
            {"llama.attention.head_count": ("ARRAY[INT32]", [4, 4])},
            "'llama.attention.head_count' has type ARRAY[INT32]",
        ),
        ({"llama.attention.head_count_kv": ("UINT32", 3)}, "cannot share 3 KV heads"),
        ({"llama.block_count": ("UINT32", 2**32 - 1)}, "num_layers is 4294967295"),
        ({"llama.block_count": ("UINT32", 3)}, "tensor 'model.layers.2.input_layernorm.weight' is missing"),
        ({"llama.block_count": ("UINT32", 1)}, "tensor 'model.layers.1."),
        ({"llama.feed_forward_length": ("UINT32", 95)}, "has shape (96, 64), not (95, 64)"),
        ({"llama.rope.freq_base": ("FLOAT32", float("nan"))}, "rope_theta is nan"),
        ({"llama.attention.layer_norm_rms_epsilon": ("FLOAT32", 0.0)}, "rms_norm_eps is 0"),
    ],
)
def test_models_that_cannot_run_are_refused_by_name(pairs: dict[str, Any], part: str, path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        GGUFWeights(tiny_gguf(pairs=pairs).write(path))
    assert part in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part"), [("rope_freqs.weight", "llama3"), ("blk.0.attn_q.bias", "self_attn.q_proj.bias")]
)
def test_extra_tensors_are_refused(name: str, part: str, path: Path) -> None:
    file = tiny_gguf()
    file.tensors[name] = RawTensor("f32", (8,), b"\0" * 32)
    with pytest.raises(ModelLoadError, match=part):
        GGUFWeights(file.write(path))


def test_an_unknown_name_is_an_error(path: Path) -> None:
    with pytest.raises(ModelLoadError, match="'nope' is missing"):
        GGUFWeights(tiny_gguf().write(path)).weight("nope")


def test_the_hash_is_of_the_numbers(path: Path, tmp_path: Path) -> None:
    first = GGUFWeights(tiny_gguf().write(path)).model_hash
    assert len(first) == 64
    assert GGUFWeights(tiny_gguf(pairs={"general.name": ("STRING", "else")}).write(path)).model_hash == first
    others = {
        GGUFWeights(file.write(tmp_path / "other.gguf")).model_hash
        for file in (
            tiny_gguf(seed=1),
            tiny_gguf(kind="f16"),
            tiny_gguf(pairs={"llama.rope.freq_base": ("FLOAT32", 5000.0)}),
        )
    }
    assert len(others | {first}) == 4


def test_gguf_and_safetensors_of_one_model_compute_the_same(path: Path, tmp_path: Path) -> None:
    tokens = [3, 1, 299, 0, 7]
    a = ReferenceLlama(GGUFWeights(tiny_gguf().write(path)), dtype=np.float64).logits(tokens)
    b = ReferenceLlama(HFWeights(write_tiny_hf(tmp_path / "hf")), dtype=np.float64).logits(tokens)
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)  # the GGUF's epsilon is a float32
