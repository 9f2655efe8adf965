"""The shape of KV pages, and the hash by which two engines know that they mean the same bytes.

Pool: ``[layers, pages, 2, kv_heads, page_size * head_dim]`` of ``dtype``. Index 1 (V) is row-major inside its page
(``[page_size, head_dim]``); index 0 (K) is transposed (``[head_dim, page_size]``), so that 16 keys lie side by side.
A slot is ``page * page_size + offset``. The number of pages is not part of the layout: engines may differ in it.

``activations`` is the precision of the products that K and V come from: it moves no byte, but engines that differ in it
compute other numbers from the same tokens, and must not take each other's pages.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

KVDtype = Literal["float16", "float32"]
Activations = Literal["float32", "int8"]
_ITEMSIZE: dict[str, int] = {"float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVLayout:
    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: KVDtype
    k_transposed: bool = True
    activations: Activations = "float32"

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.itemsize

    @property
    def bytes_per_page(self) -> int:
        """One page over all layers."""
        return self.bytes_per_token * self.page_size

    def shape(self, total_pages: int) -> tuple[int, int, int, int, int]:
        return (self.layers, total_pages, 2, self.kv_heads, self.page_size * self.head_dim)

    @property
    def hash(self) -> str:
        """16 hex digits over every field; equal exactly when the bytes mean the same."""
        canonical = json.dumps({"version": 1, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]
