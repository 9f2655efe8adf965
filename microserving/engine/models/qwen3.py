"""Qwen3, dense (arXiv 2505.09388): the Llama graph, with an RMSNorm of every head of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tvm.relax.frontend import nn

from microserving.engine.kernels.projection import head_norm_kernel
from microserving.engine.models.base import Scratch, call_inplace
from microserving.engine.models.llama import LlamaLayer, LlamaModel
from microserving.engine.models.spec import ModelSpec


class Qwen3Layer(LlamaLayer):
    VECTORS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **LlamaLayer.VECTORS,
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
    }

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.q_norm = nn.Parameter((spec.config.head_dim,), "float32")
        self.k_norm = nn.Parameter((spec.config.head_dim,), "float32")

    def project(self, x: Any, scratch: Scratch) -> Any:
        config = self.spec.config
        kernel = head_norm_kernel(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
        return call_inplace(kernel, "head_norm", [super().project(x, scratch), self.q_norm, self.k_norm], 0)


class Qwen3Model(LlamaModel):
    LAYER = Qwen3Layer
