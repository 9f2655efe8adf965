"""The engine: requests in, model steps, chunks out (signatures first; the bodies follow)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from microserving.engine.config import EngineConfig
from microserving.engine.jobs import LoadSnapshot, Reservation, SendDone, SendJob
from microserving.engine.runner import ModelRunner
from microserving.errors import MicroservingError
from microserving.protocol.generation import GenerationChunk, GenerationRequest
from microserving.transports.base import Lease

OnChunk = Callable[[GenerationChunk | MicroservingError], None]
OnSent = Callable[[SendDone | MicroservingError], None]


class Detokenizer(Protocol):
    def put(self, token_id: int, /) -> str: ...
    def flush(self) -> str: ...


class EngineTokenizer(Protocol):
    """What the engine needs of a tokenizer (`microserving.tokenizer.Tokenizer` has it)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    def detokenizer(self) -> Detokenizer: ...


class Engine:
    """Thread-safe facade; callbacks are called without the lock, on the engine thread or on the aborting one."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: EngineTokenizer,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None: ...

    @property
    def max_context(self) -> int:
        """The least of the model's, the config's and the pool's limit, in tokens."""
        raise NotImplementedError

    def submit(self, request: GenerationRequest, *, begin: int | None = None, on_chunk: OnChunk) -> None:
        raise NotImplementedError

    def submit_send(self, job: SendJob, on_done: OnSent) -> None:
        raise NotImplementedError

    def prep_recv(self, request_id: str, prompt_token_ids: tuple[int, ...], end: int) -> Reservation:
        """Raises KVExhausted when the pages are not there now; AsyncEngine waits."""
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        raise NotImplementedError

    def renew(self, request_id: str) -> float:
        """Seconds until the lease now expires. Raises LeaseError."""
        raise NotImplementedError

    def match_prefix(self, prompt_token_ids: tuple[int, ...]) -> int:
        raise NotImplementedError

    def begin_write(self, lease: Lease) -> bool:
        raise NotImplementedError

    def end_write(self, lease: Lease, ok: bool) -> None:
        raise NotImplementedError

    def load(self) -> LoadSnapshot:
        raise NotImplementedError

    def step(self) -> bool:
        """Run one step. False = there was nothing to do."""
        raise NotImplementedError
