"""The limits that a scheduler keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PrefixCacheKind = Literal["radix", "off"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes in pages, tokens or sequences as named. The defaults limit nothing, and cache nothing.

    page_wait_s: how long a send may wait while nothing can run. max_concurrent_prefills: sequences between their first
    and their last chunk. ingestion_queue_size: sequences that wait to be started. memory_threshold: the share of the
    pool that may be in use after a start while others run. chunked_prefill_enabled: False = a prompt is one chunk.
    """

    total_pages: int
    page_size: int
    chunk_size_tokens: int
    max_batch_size: int
    max_sequences: int
    lease_ttl_s: float
    page_wait_s: float
    prefix_cache: PrefixCacheKind = "off"
    max_concurrent_prefills: int | None = None
    memory_threshold: float = 1.0
    chunked_prefill_enabled: bool = True
    ingestion_queue_size: int | None = None

    @property
    def kept_back(self) -> int:
        """Pages that a start leaves alone while others run."""
        return self.total_pages - int(self.memory_threshold * self.total_pages)
