"""What a router program can ask of an engine: the verbs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable
from typing import Literal, TypeVar

from microserving.policies import EngineLoad
from microserving.program.request import Request
from microserving.protocol.generation import GenerationChunk, RemoteSendResult
from microserving.protocol.records import record

ResultT = TypeVar("ResultT")

EngineRole = Literal["prefill", "decode", "hybrid"]
"""The pool that an engine is in; a hybrid one is in both."""


@record
class Received:
    """A decode engine's answer to ``prep_recv``: room for the K/V of ``[prefix_matched_length, end)``.

    kv_append_metadata: where to write, opaque; only engines read it. prefix_matched_length: how many leading prompt
    tokens the engine has already. end: one behind the last position to receive. engine: who made the reservation.
    rank: the rank within the engine that receives. lease_ttl_s: how long the reservation lives unless it is renewed
    (the host does that); None when the engine did not say.
    """

    kv_append_metadata: str
    prefix_matched_length: int
    end: int
    engine: EngineClient
    rank: int = 0
    lease_ttl_s: float | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing needs to be sent, because all of it was matched."""
        return self.prefix_matched_length >= self.end


NOTHING_SENT = RemoteSendResult(
    tokens_computed=0,
    tokens_sent=0,
    bytes_sent=0,
    prefix_matched_length=0,
    prefill_ms=0.0,
    transfer_ms=0.0,
    exposed_ms=0.0,
)
"""What ``remote_send`` returns when everything was matched."""


class EngineClient(ABC):
    """One engine, as a router program sees it. Used on the event loop only.

    Nothing has to be given back: the host frees whatever a request still holds on any engine when the request ends,
    for whatever reason. Every verb raises ``microserving.errors`` leaves: ``EngineUnavailable`` (the engine failed or
    cannot be reached), ``TransferFailed``, ``KVExhausted``, ``InvalidRequest`` (an index out of range), ...; let
    them pass unless the program has something better to do.
    """

    @property
    @abstractmethod
    def id(self) -> str:
        """The engine's node id, for example ``decode-1``; unique in the cluster."""

    @property
    @abstractmethod
    def role(self) -> EngineRole:
        """The pool that the engine is in."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests that this router has on the engine now: exact, live, back to 0 when they have ended."""

    @property
    @abstractmethod
    def load(self) -> EngineLoad:
        """What the engine last said about itself (polled)."""

    @abstractmethod
    async def prep_recv(self, request: Request, *, end: int) -> Received:
        """Reserve room for the K/V of ``prompt[:end]``; pass the answer to another engine's ``remote_send``.

        end: in [0, prompt_length]; negative counts from the end. Waits a bounded time for free pages.
        Raises: KVExhausted when there are none, InvalidRequest, EngineUnavailable.
        """

    @abstractmethod
    async def remote_send(self, request: Request, *, to: Received) -> RemoteSendResult:
        """Compute the K/V that ``to`` waits for and write it into the receiver, layer by layer.

        Returns when every byte is in place; at once, without asking the engine, when ``to.complete``.
        Raises: TransferFailed, EngineUnavailable, KVExhausted.
        """

    @abstractmethod
    def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        """Generate; the last chunk has a ``finish_reason``.

        begin: how much of the prompt's K/V was received (``end`` of ``prep_recv``); the engine computes the rest.
        0 for a request that the engine does not know yet: it does everything.
        Raises, while iterated: TransferFailed when the K/V before ``begin`` did not arrive, EngineUnavailable, ...
        """

    @abstractmethod
    async def commit(self, request: Request) -> int:
        """Put what was received for the request into the engine's prefix cache, without generating.

        That ends the reservation that ``prep_recv`` made; any request that begins with these tokens is a hit from then
        on. Returns: how many of the prompt's leading tokens the engine has cached now.
        Raises: LeaseError when there is no reservation or its K/V did not arrive whole, EngineUnavailable.
        """

    @abstractmethod
    async def abort(self, request: Request) -> None:
        """Free all that the engine holds for the request. Idempotent; seldom needed, as the host does it."""

    @abstractmethod
    async def renew(self, request: Request) -> float | None:
        """Extend the lease of the request's reservation. No program must call it: the host does.

        Returns: seconds from now until the lease expires; None when the engine does not know the verb.
        Raises: a MicroservingError when there is no live reservation any more, EngineUnavailable.
        """

    async def while_answering(self, work: Awaitable[ResultT]) -> ResultT:
        """``work``, which waits elsewhere on this engine's behalf. No program must call it: the host does.

        Raises EngineUnavailable as soon as the host gives the engine up.
        """
        return await work

    @abstractmethod
    async def match_prefix(self, request: Request) -> int:
        """How many leading prompt tokens the engine has in its cache. Reads only."""
