"""A small model over random numbers, in every weight format: the fixture of all tests that compute a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from microserving.model_files import ModelConfig, Weight, WeightKind, tensor_shapes
from microserving.protocol.kv_layout import KVDtype, KVLayout

QUANTISED: tuple[WeightKind, ...] = ("q4_1", "q4_0", "q8_0")
DENSE: tuple[WeightKind, ...] = ("f32", "f16", "bf16")


def small_config(
    *, tied: bool, layers: int = 2, vocab: int = 100, architecture: str = "llama"
) -> ModelConfig:
    """Grouped heads, a ragged vocabulary (no multiple of 16), sizes that are no powers of two."""
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        hidden_size=96,
        intermediate_size=160,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=vocab,
        max_context=2048,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attention_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        name="random",
    )


def layout_of(config: ModelConfig, dtype: KVDtype, page_size: int = 16) -> KVLayout:
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, page_size, dtype)


def random_weight(
    name: str, kind: WeightKind, shape: tuple[int, ...], rng: np.random.Generator, size: float = 0.08
) -> Weight:
    """Numbers of about ``size``; the bytes are built here from the formats' definitions."""
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape
    if kind in DENSE:
        values = (rng.standard_normal((rows, columns)) * size).astype(np.float32)
        data = _dense_bytes(values, kind)
    else:
        data = _block_bytes(rows, columns // 32, kind, rng, size)
    return Weight(name, kind, shape, data)


def _dense_bytes(values: npt.NDArray[np.float32], kind: WeightKind) -> npt.NDArray[np.uint8]:
    if kind == "bf16":
        stored = (values.view(np.uint32) >> np.uint32(16)).astype("<u2")
    else:
        stored = values.astype("<f4" if kind == "f32" else "<f2")
    return np.ascontiguousarray(stored).view(np.uint8)


def _block_bytes(
    rows: int, blocks: int, kind: WeightKind, rng: np.random.Generator, size: float
) -> npt.NDArray[np.uint8]:
    steps = 64 if kind == "q8_0" else 4
    scale = (rng.uniform(0.5, 1.5, (rows, blocks, 1)) * size / steps).astype("<f2")
    parts = [scale.view(np.uint8)]
    if kind == "q4_1":
        parts.append((scale * np.float16(-7.5)).astype("<f2").view(np.uint8))
    codes = rng.integers(0, 256, (rows, blocks, 32 if kind == "q8_0" else 16), np.uint8)
    return np.concatenate([*parts, codes], axis=2).reshape(rows, -1)


@dataclass(frozen=True)
class RandomWeights:
    """A ``WeightSource``. Matrices take the formats of ``kinds`` in turn; norms are f32 around 1, biases around 0."""

    config: ModelConfig
    kinds: tuple[WeightKind, ...] = QUANTISED
    seed: int = 0

    @property
    def model_hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def names(self) -> Sequence[str]:
        return list(tensor_shapes(self.config))

    def weight(self, name: str) -> Weight:
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        place = self.names().index(name)
        shape = tensor_shapes(self.config)[name]
        rng = np.random.default_rng([self.seed, place])
        if len(shape) == 1:
            middle, size = (0.0, 0.5) if name.endswith(".bias") else (1.0, 0.1)
            vector = (middle + size * rng.standard_normal(shape)).astype("<f4")
            return Weight(name, "f32", shape, vector.view(np.uint8)[None])
        return random_weight(name, self.kinds[place % len(self.kinds)], shape, rng)


def pool_memory(layout: KVLayout, total_pages: int, fill: int = 0xFF) -> npt.NDArray[np.uint8]:
    """Memory for a pool, 64-byte aligned; 0xFF bytes are NaNs, so that a read of a free slot shows."""
    size = layout.bytes_per_page * total_pages
    memory = np.full(size + 64, fill, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]
