"""The one configuration of an engine process: frozen, validated, unknown keys refused. CLI flags map 1:1 to fields."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from microserving.protocol.kv_layout import Activations, KVDtype

NodeRole = Literal["hybrid", "prefill", "decode"]


def available_cpus() -> int:
    """Cores that this process may run on (its affinity)."""
    return len(os.sched_getaffinity(0))


class EngineConfig(BaseModel):
    """Sizes in tokens, pages or bytes as named; durations in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2-135m-instruct"
    served_model_name: str | None = None
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
    chunk_size_tokens: int = Field(256, ge=1)
    max_batch_size: int = Field(32, ge=1)
    max_sequences: int = Field(128, ge=1)
    reserve_wait_s: float = Field(5.0, ge=0)
    lease_ttl_s: float = Field(30.0, gt=0, le=3600)
    transfer_timeout_s: float = Field(30.0, gt=0)
    cluster_secret_file: Path | None = None
    runtime_dir: Path | None = None
    cache_dir: Path | None = None
    strict_fields: bool = False
