"""The engine thread and its bridge to asyncio (signatures first; the bodies follow)."""

from __future__ import annotations

from collections.abc import AsyncIterator

from microserving.engine.engine import Engine
from microserving.engine.jobs import LoadSnapshot, Reservation, SendDone, SendJob
from microserving.protocol.generation import GenerationChunk, GenerationRequest


class AsyncEngine:
    """Runs ``engine.step`` on one thread; used from one event loop (the one that called ``start``)."""

    def __init__(self, engine: Engine, *, reserve_wait_s: float = 5.0, max_waiting: int = 64) -> None: ...

    @property
    def engine(self) -> Engine:
        """Also the transport's ``LeaseObserver``."""
        raise NotImplementedError

    @property
    def healthy(self) -> bool:
        raise NotImplementedError

    @property
    def max_context(self) -> int:
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    def generate(
        self, request: GenerationRequest, begin: int | None = None
    ) -> AsyncIterator[GenerationChunk]:
        """Async generator; aborts when closed or cancelled."""
        raise NotImplementedError

    async def send(self, job: SendJob) -> SendDone:
        """When cancelled it aborts, and returns only after the last put has stopped."""
        raise NotImplementedError

    async def prep_recv(self, request_id: str, prompt_token_ids: tuple[int, ...], end: int) -> Reservation:
        """Waits up to ``reserve_wait_s`` for pages, then KVExhausted with retry_after_s."""
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        raise NotImplementedError

    def renew(self, request_id: str) -> float:
        raise NotImplementedError

    def match_prefix(self, prompt_token_ids: tuple[int, ...]) -> int:
        raise NotImplementedError

    def load(self) -> LoadSnapshot:
        raise NotImplementedError
