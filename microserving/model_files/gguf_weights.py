"""A model in a GGUF file, as a WeightSource: canonical names, NeoX order, checked shapes.

Owns the mapping from GGUF's tensor names and its row order. The converter to GGUF interleaves the rows of a Llama's q and k
for a rope that rotates neighbours; here that is undone on the packed rows, without unpacking them. Other architectures
keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from microserving.errors import ModelLoadError
from microserving.model_files.gguf import GGUFFile, GGUFMetadata, GGUFTensor
from microserving.model_files.model_config import ModelConfig, check_tensors, config_from_gguf
from microserving.model_files.model_hash import model_hash
from microserving.model_files.weights import Weight

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INTERLEAVED = frozenset({"llama"})
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")


def canonical_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for one that no architecture here has."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def neox_rows(rows: npt.NDArray[np.uint8], heads: int) -> npt.NDArray[np.uint8]:
    """Rows of q or k, neighbours paired (0, d/2, 1, d/2 + 1, ...) -> first halves then second halves, per head."""
    count, width = rows.shape
    half = count // heads // 2
    return rows.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(count, width)


class GGUFWeights:
    """Implements WeightSource over one GGUF file. Raises ModelLoadError when the file is not such a model."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        try:
            self._config = _config(self._file)
            self._tensors = _by_canonical_name(self._file.tensors)
            check_tensors(self._config, {name: tensor.shape for name, tensor in self._tensors.items()})
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error.message}") from None

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def metadata(self) -> GGUFMetadata:
        """The file's key/value pairs (the tokenizer's are among them)."""
        return self._file.metadata

    @cached_property
    def model_hash(self) -> str:
        return model_hash(self._config, [self._stored(name) for name in self._tensors])

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def weight(self, name: str) -> Weight:
        if name == "lm_head.weight" and self._config.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        if name not in self._tensors:
            raise ModelLoadError(f"{self._file.path}: tensor {name!r} is missing")
        stored = self._stored(name)
        heads = self._rotated_heads(name)
        if heads is None:
            return stored
        rows = neox_rows(stored.rows, heads)
        rows.flags.writeable = False
        return Weight(name, stored.kind, stored.shape, rows)

    def _rotated_heads(self, name: str) -> int | None:
        """How many heads a tensor has whose rows the converter interleaved; None for other tensors."""
        if self._config.architecture not in _INTERLEAVED:
            return None
        if name.endswith("self_attn.q_proj.weight"):
            return self._config.num_heads
        if name.endswith("self_attn.k_proj.weight"):
            return self._config.num_kv_heads
        return None

    def _stored(self, name: str) -> Weight:
        """The tensor as the file has it: no copy."""
        tensor = self._tensors[name]
        count = tensor.shape[0] if len(tensor.shape) == 2 else 1
        return Weight(name, tensor.kind, tensor.shape, self._file.tensor_bytes(tensor).reshape(count, -1))


def _by_canonical_name(tensors: Mapping[str, GGUFTensor]) -> dict[str, GGUFTensor]:
    named: dict[str, GGUFTensor] = {}
    for name, tensor in tensors.items():
        canonical = canonical_name(name)
        if canonical is None:
            raise ModelLoadError(f"tensor {name!r} is not part of a supported model")
        named[canonical] = tensor
    return named


def _config(file: GGUFFile) -> ModelConfig:
    if "rope_freqs.weight" in file.tensors:
        raise ModelLoadError("rope scaling 'llama3' (tensor rope_freqs.weight) is not supported")
    embedding = file.tensors.get("token_embd.weight")
    return config_from_gguf(
        file.metadata,
        vocab_size=1 if embedding is None else embedding.shape[0],
        tied="output.weight" not in file.tensors,
        fallback_name=file.path.stem,
    )
