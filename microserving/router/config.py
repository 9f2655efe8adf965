"""The one configuration of a router process: frozen, validated, unknown keys refused. CLI flags map 1:1 to fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from microserving.protocol.addresses import is_loopback
from microserving.protocol.names import Names, split_names

Setting = str | int | float | bool
"""A program setting as a configuration file or a command line gives it; the program's own type decides."""


def peer_url(text: str) -> str:
    """``text`` as the base URL of an engine: ``http://host:port``. The scheme may be left out.

    Raises: ValueError for anything else.
    """
    url = urlsplit(text if "://" in text else f"http://{text}")
    if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/"):
        raise ValueError(f"{text!r} is not the address of an engine (http://host:port)")
    if url.query or url.fragment or url.username is not None or url.password is not None:
        raise ValueError(f"{text!r} is not the address of an engine (http://host:port)")
    url.port  # noqa: B018 - raises ValueError when it is no port
    return f"{url.scheme}://{url.netloc}"


def _unique(peers: tuple[str, ...]) -> tuple[str, ...]:
    for peer in peers:
        if peers.count(peer) > 1:
            raise ValueError(f"{peer} is there more than once")
    return peers


Peers = Annotated[
    tuple[Annotated[str, AfterValidator(peer_url)], ...],
    BeforeValidator(split_names),
    AfterValidator(_unique),
]


class RouterConfig(BaseModel):
    """Durations in seconds. An engine that is a peer of both kinds is in both pools.

    program: a file, or the name of a shipped program. program_state_file: where a deployment is kept for the next start
    (``program_memory``); nowhere by default. peer_timeout_s: at start every peer must answer within this,
    unless allow_missing_peers: then the router serves at once, and answers 503 until an engine joins. served_model: the
    only model that an engine may have; known before any engine answers. tokenizer_dir: with a tokenizer.json, for
    engines that cannot give theirs. circuit_failures: in a row, after which an engine that answers its probes is only
    tried now and then. engine_drain_timeout_s: requests that take longer on an engine that is drained go on elsewhere.
    An engine is taken out of its pools after probe_misses probes without an answer (at once when its connection is
    refused or breaks; not because a request could not connect within connect_timeout_s: that request goes elsewhere).
    stage_timeout_s: the longest silence of an engine within one verb or stream.
    request_timeout_s: the deadline of a request that brings none. stall_timeout_s: how long a program may neither ask an
    engine nor give a chunk. max_attempts: in a row without a new token, for one request; all requests together may be
    tried again retry_budget_burst times at once, and for a share of retry_budget_share of them for good.
    hedge_after_s: a request without output for so long is tried on another engine as well.

    api_key_file: keys of clients, a line each; engine_api_key_file: the key that engines want. max_concurrent_per_client,
    requests_per_minute: limits of one key (without keys: of one address); none by default. max_in_flight, admission,
    queue_size, queue_timeout_s: ``admission.AdmissionSettings``. max_body_bytes: by default what the model's longest
    prompt needs. write_timeout_s: how long a client may not read. shutdown_timeout_s: how long running requests may take
    to finish when the router is told to stop.

    admin_port 0, admin_socket None: no admin routes there. kept_programs, program_drain_timeout_s, rollback_*: of
    ``program_host.HostSettings``. dry_run_timeout_s: for the trial of a program before it is put in charge.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    program: str = Field(min_length=1)
    program_settings: dict[str, Setting] = Field(default_factory=dict)
    program_state_file: Path | None = Field(None, strict=False)
    prefill_peers: Peers = ()
    decode_peers: Peers = ()
    serving_bind: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    peer_timeout_s: float = Field(10.0, gt=0)
    connect_timeout_s: float = Field(5.0, gt=0)
    probe_interval_s: float = Field(2.0, gt=0)
    probe_timeout_s: float = Field(2.0, gt=0)
    probe_connect_timeout_s: float = Field(0.5, gt=0)
    probe_misses: int = Field(3, ge=1)
    allow_missing_peers: bool = False
    served_model: str | None = Field(None, min_length=1)
    tokenizer_dir: Path | None = Field(None, strict=False)
    circuit_failures: int = Field(5, ge=1)
    engine_drain_timeout_s: float = Field(30.0, ge=0)
    prep_recv_timeout_s: float = Field(30.0, gt=0)
    stage_timeout_s: float = Field(300.0, gt=0)
    release_timeout_s: float = Field(5.0, gt=0)
    request_timeout_s: float | None = Field(None, gt=0)
    stall_timeout_s: float = Field(60.0, gt=0)
    max_attempts: int = Field(3, ge=1)
    retry_budget_share: float = Field(0.2, ge=0)
    retry_budget_burst: int = Field(256, ge=0)
    hedge_after_s: float | None = Field(None, gt=0)
    cluster_secret_file: Path | None = None
    api_key_file: Path | None = Field(None, strict=False)
    engine_api_key_file: Path | None = Field(None, strict=False)
    max_concurrent_per_client: int | None = Field(None, ge=1)
    requests_per_minute: int | None = Field(None, ge=1)
    cors_origins: Names = ()
    max_in_flight: int = Field(4096, ge=1)
    admission: Literal["queue", "reject"] = "queue"
    queue_size: int = Field(1024, ge=0)
    queue_timeout_s: float = Field(30.0, gt=0)
    max_body_bytes: int | None = Field(None, ge=1)
    write_timeout_s: float = Field(60.0, gt=0)
    shutdown_timeout_s: float = Field(30.0, ge=0)
    strict_fields: bool = False
    admin_bind: str = "127.0.0.1"
    admin_port: int = Field(0, ge=0, le=65535)
    admin_socket: Path | None = Field(None, strict=False)
    admin_key_file: Path | None = Field(None, strict=False)
    kept_programs: int = Field(3, ge=0)
    program_drain_timeout_s: float = Field(60.0, gt=0)
    dry_run_timeout_s: float = Field(5.0, gt=0)
    rollback_window: int = Field(20, ge=0)
    rollback_threshold: float = Field(0.5, gt=0, le=1)

    @model_validator(mode="after")
    def _has_peers(self) -> RouterConfig:
        if not self.prefill_peers and not self.decode_peers and not self.allow_missing_peers:
            raise ValueError("no engine is named: prefill_peers and decode_peers are both empty")
        return self

    @model_validator(mode="after")
    def _admin_is_guarded(self) -> RouterConfig:
        if self.admin_port and self.admin_key_file is None and not is_loopback(self.admin_bind):
            raise ValueError(f"the admin routes listen on {self.admin_bind} only with admin_key_file")
        return self
