"""All that a compiled model depends on. Imports no TVM: an engine with cached code needs the key, not the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from microserving.engine.kernels.isa import Isa
from microserving.engine.kernels.plan import AttentionShape
from microserving.engine.kernels.tiles import TileKind
from microserving.model_files import ModelConfig
from microserving.protocol.kv_layout import KVLayout


@dataclass(frozen=True)
class ModelSpec:
    """All that a compiled model depends on. kinds: tile kind of each matrix parameter."""

    config: ModelConfig
    layout: KVLayout
    isa: Isa
    kinds: Mapping[str, TileKind]

    @property
    def attention(self) -> AttentionShape:
        layout = self.layout
        return AttentionShape(
            self.config.num_heads, layout.kv_heads, layout.head_dim, layout.page_size, layout.dtype
        )
