"""Qwen2 and Qwen2.5 (arXiv 2407.10671): the Llama graph, with a bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tvm.relax.frontend import nn

from microserving.engine.kernels.projection import bias_kernel
from microserving.engine.models.base import Scratch, call_inplace
from microserving.engine.models.llama import LlamaLayer, LlamaModel
from microserving.engine.models.spec import ModelSpec


class Qwen2Layer(LlamaLayer):
    VECTORS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **LlamaLayer.VECTORS,
        "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    }

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.qkv_bias = nn.Parameter((self.qkv.shape.rows,), "float32")

    def project(self, x: Any, scratch: Scratch) -> Any:
        return call_inplace(
            bias_kernel(self.qkv.shape.rows), "add_bias", [super().project(x, scratch), self.qkv_bias], 0
        )


class Qwen2Model(LlamaModel):
    LAYER = Qwen2Layer
