"""The Llama forward pass, written in numpy from the architecture's formulas; shares no code with the engine.

Touvron et al. 2023 (https://arxiv.org/abs/2302.13971) with grouped-query attention (https://arxiv.org/abs/2305.13245):
RMSNorm before attention and before the MLP, rotary embeddings in NeoX order, SwiGLU, residual adds. A projection that has a
bias adds it (Qwen2, https://arxiv.org/abs/2407.10671); a head norm, when there is one, comes between the projection of q and k
and their rotation (Qwen3, https://arxiv.org/abs/2505.09388).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from microserving.model_files import WeightSource

Array = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Forward:
    """logits [T, vocab]; keys (after rope) and values [layers, T, kv_heads, head_dim]."""

    logits: Array
    keys: Array
    values: Array


class ReferenceLlama:
    """Computes all positions of one sequence at once, without a cache.

    dtype: float64 or float32 for everything. kv_dtype: when set, K (after rope) and V are rounded to it before
    attention, as an engine does that stores its KV in float16.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: npt.DTypeLike = np.float32,
        kv_dtype: npt.DTypeLike | None = None,
    ) -> None:
        self.config = source.config
        self.dtype = np.dtype(dtype)
        self.kv_dtype = None if kv_dtype is None else np.dtype(kv_dtype)
        self._weights = {name: source.weight(name).dequantize().astype(self.dtype) for name in source.names()}

    def forward(self, token_ids: Sequence[int]) -> Forward:
        config = self.config
        x = self._weights["model.embed_tokens.weight"][np.asarray(token_ids)]
        keys, values = [], []
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            attended, k, v = self._attention(self._norm(x, prefix + "input_layernorm"), prefix + "self_attn.")
            keys.append(k)
            values.append(v)
            x = x + attended
            x = x + self._mlp(self._norm(x, prefix + "post_attention_layernorm"), prefix + "mlp.")
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        logits = self._norm(x, "model.norm") @ self._weights[head].T
        return Forward(logits, np.stack(keys), np.stack(values))

    def logits(self, token_ids: Sequence[int]) -> Array:
        """[T, vocab]."""
        return self.forward(token_ids).logits

    def greedy(self, token_ids: Sequence[int], count: int, stop: frozenset[int] = frozenset()) -> list[int]:
        """Up to ``count`` more tokens, the largest logit each; a token of ``stop`` is the last one."""
        produced: list[int] = []
        while len(produced) < count and not (produced and produced[-1] in stop):
            produced.append(int(self.logits([*token_ids, *produced])[-1].argmax()))
        return produced

    def _norm(self, x: Array, name: str) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return (
            x
            / np.sqrt(mean_square + self.dtype.type(self.config.rms_norm_eps))
            * self._weights[name + ".weight"]
        )

    def _linear(self, x: Array, name: str) -> Array:
        y = x @ self._weights[name + ".weight"].T
        bias = self._weights.get(name + ".bias")
        return y if bias is None else y + bias

    def _mlp(self, x: Array, prefix: str) -> Array:
        gate = self._linear(x, prefix + "gate_proj")
        silu = gate / (1 + np.exp(-gate))
        return self._linear(silu * self._linear(x, prefix + "up_proj"), prefix + "down_proj")

    def _attention(self, x: Array, prefix: str) -> tuple[Array, Array, Array]:
        config, count = self.config, len(x)
        q = self._linear(x, prefix + "q_proj").reshape(count, config.num_heads, config.head_dim)
        k = self._linear(x, prefix + "k_proj").reshape(count, config.num_kv_heads, config.head_dim)
        v = self._linear(x, prefix + "v_proj").reshape(count, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q, k = self._norm(q, prefix + "q_norm"), self._norm(k, prefix + "k_norm")
        q, k = self._rope(q), self._rope(k)
        if self.kv_dtype is not None:
            k, v = k.astype(self.kv_dtype).astype(self.dtype), v.astype(self.kv_dtype).astype(self.dtype)
        future = np.triu(np.ones((count, count), dtype=bool), 1)
        group = config.num_heads // config.num_kv_heads
        heads = []
        for head in range(config.num_heads):
            scores = q[:, head] @ k[:, head // group].T / np.sqrt(self.dtype.type(config.head_dim))
            scores = np.where(future, -np.inf, scores)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            heads.append(weights @ v[:, head // group])
        return self._linear(np.concatenate(heads, axis=-1), prefix + "o_proj"), k, v

    def _rope(self, x: Array) -> Array:
        """NeoX order: element i rotates with element i + d/2 by position * theta^(-2i/d). Angles in float64."""
        count, _, size = x.shape
        frequencies = self.config.rope_theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
        angles = np.arange(count, dtype=np.float64)[:, None] * frequencies
        cos, sin = np.cos(angles)[:, None].astype(x.dtype), np.sin(angles)[:, None].astype(x.dtype)
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
