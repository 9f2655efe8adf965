"""The one configuration of an engine process: frozen, validated, unknown keys refused. CLI flags map 1:1 to fields."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from microserving.protocol.chat_formats import ReasoningSetting, ToolCallSetting
from microserving.protocol.kv_layout import Activations, KVDtype
from microserving.protocol.names import ModelNames
from microserving.scheduler import PrefixCacheKind, SchedulerConfig

NodeRole = Literal["hybrid", "prefill", "decode"]
DRAIN_S = 10.0
"""How long running requests may take to finish when their server is told to stop, unless it is told how long."""


def available_cpus() -> int:
    """Cores that this process may run on (its affinity)."""
    return len(os.sched_getaffinity(0))


class EngineConfig(BaseModel):
    """Sizes in tokens, pages or bytes as named; durations in seconds.

    max_itl_ratio: how much longer than its decodes alone a step with prompt tokens may take. memory_threshold: the share
    of the KV pool that may be in use when another request starts beside others. max_sequences counts active and waiting
    requests, ingestion_queue_size those that wait. served_model_name: the names that clients may use; the model's own
    when there is none. max_body_bytes: None: what the model's longest prompt needs. max_concurrent_per_client,
    requests_per_minute: of one API key, or address; a router is one, too. shutdown_timeout_s: how long running requests
    may take to finish when the engine is told to stop; None: ``DRAIN_S`` on a hybrid engine, whose clients have nobody
    else, and no time on one behind a router, where they go on elsewhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = "smollm2-135m-instruct"
    served_model_name: ModelNames = ()
    serving_bind: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    node_role: NodeRole = "hybrid"
    node_id: str = Field("engine-0", min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    rank: int = Field(0, ge=0)
    threads: int = Field(default_factory=available_cpus, ge=1, le=1024)
    activations: Activations = "float32"
    kv_dtype: KVDtype = "float16"
    page_size: Literal[16, 32, 64] = 16
    kv_cache_bytes: int = Field(512 * 2**20, ge=2**20)
    max_context: int | None = Field(None, ge=1)
    chat_template: Path | None = None
    tool_call_format: ToolCallSetting = "auto"
    reasoning_format: ReasoningSetting = "auto"
    chunk_size_tokens: int = Field(256, ge=1)
    max_batch_size: int = Field(32, ge=1)
    max_sequences: int = Field(128, ge=1)
    max_concurrent_prefills: int = Field(4, ge=1)
    ingestion_queue_size: int = Field(64, ge=1)
    memory_threshold: float = Field(0.85, gt=0, le=1)
    chunked_prefill_enabled: bool = True
    max_itl_ratio: float = Field(2.5, gt=1)
    prefix_cache: PrefixCacheKind = "radix"
    reserve_wait_s: float = Field(5.0, ge=0, le=3600)
    lease_ttl_s: float = Field(30.0, gt=0, le=3600)
    transfer_timeout_s: float = Field(30.0, gt=0, le=3600)
    shutdown_timeout_s: float | None = Field(None, ge=0)
    cluster_secret_file: Path | None = None
    api_key_file: Path | None = None
    runtime_dir: Path | None = None
    cache_dir: Path | None = None
    strict_fields: bool = False
    max_body_bytes: int | None = Field(None, ge=1)
    max_concurrent_per_client: int | None = Field(None, ge=1)
    requests_per_minute: int | None = Field(None, ge=1)

    @property
    def drain_s(self) -> float:
        """``shutdown_timeout_s`` as it holds."""
        if self.shutdown_timeout_s is not None:
            return self.shutdown_timeout_s
        return DRAIN_S if self.node_role == "hybrid" else 0.0

    def scheduler_config(self, total_pages: int, page_size: int) -> SchedulerConfig:
        """The scheduler's part of it, for a pool of that size."""
        return SchedulerConfig(
            total_pages=total_pages,
            page_size=page_size,
            chunk_size_tokens=self.chunk_size_tokens,
            max_batch_size=self.max_batch_size,
            max_sequences=self.max_sequences,
            lease_ttl_s=self.lease_ttl_s,
            page_wait_s=self.reserve_wait_s,
            prefix_cache=self.prefix_cache,
            max_concurrent_prefills=self.max_concurrent_prefills,
            memory_threshold=self.memory_threshold,
            chunked_prefill_enabled=self.chunked_prefill_enabled,
            ingestion_queue_size=self.ingestion_queue_size,
        )
