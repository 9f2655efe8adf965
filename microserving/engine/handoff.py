"""Both ends of a KV hand-off: `prep_recv`'s descriptor at the receiver, all of `remote_send` at the sender.

Owns the order of the steps and who is told what when one fails. Does not know HTTP, how pages are reserved, how the
model runs or how bytes get there: those are the scheduler, the engine and the transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from microserving.engine.runner import LayerTimes
from microserving.protocol.generation import RemoteSendResult
from microserving.protocol.kv_descriptor import check_secret
from microserving.protocol.kv_layout import KVLayout
from microserving.transports.base import RemotePool, Transport

Clock = Callable[[], float]
"""Seconds."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Who receives: the engine's id, this process of it, its rank."""

    engine_id: str
    epoch: str
    rank: int


class Reservation(Protocol):
    """What the descriptor needs of a reservation. expires_at: in the seconds of ``time.monotonic``."""

    @property
    def request_id(self) -> str: ...
    @property
    def lease_id(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def matched(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def expires_at(self) -> float: ...


class HandoffReceiver:
    """Writes the descriptors of this engine's reservations."""

    def __init__(
        self,
        identity: EngineIdentity,
        layout: KVLayout,
        model_hash: str,
        secret: bytes | None,
        *,
        monotonic: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._model_hash = model_hash
        self._secret = check_secret(secret)
        self._monotonic = monotonic
        self._wall = wall

    def descriptor(self, reservation: Reservation) -> str:
        """The `kv_append_metadata` of positions [matched, end) of a reservation."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SendJob:
    """KV of prompt positions [begin, end) to compute and put into another engine's pool.

    destination: names the receiving process (engine id and epoch); all SEND sequences of a step share one.
    slots: int32 [end - begin], the receiver's slot of each position.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    begin: int
    end: int
    pool: RemotePool
    destination: str
    slots: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SendStep:
    """One engine step that computed a part of a job. started_ns: CLOCK_MONOTONIC when the runner was called."""

    started_ns: int
    layer_times: LayerTimes | None


@dataclass(frozen=True, slots=True)
class SendDone:
    """A job whose every layer has been put. tokens_computed: prompt tokens that this engine ran for it.

    steps: in order, every step that had tokens of this job.
    """

    tokens_computed: int
    tokens_sent: int
    prefix_matched_length: int
    steps: tuple[SendStep, ...]


class SendEngine(Protocol):
    """The engine as the sender needs it (``AsyncEngine``)."""

    async def send(self, job: SendJob) -> SendDone:
        """Compute and put. Raises MicroservingError.

        However it ends (cancelled, too), no put of the job runs any more and none will: the pages may go to others.
        """


class HandoffSender:
    """Runs `remote_send`. timeout_s bounds each hand-shake with the receiver."""

    def __init__(
        self,
        transport: Transport,
        engine: SendEngine,
        layout: KVLayout,
        model_hash: str,
        secret: bytes | None,
        *,
        timeout_s: float,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        wall: Clock = time.time,
    ) -> None:
        self._transport = transport
        self._engine = engine
        self._layout = layout
        self._model_hash = model_hash
        self._secret = check_secret(secret)
        self._timeout_s = timeout_s
        self._monotonic_ns = monotonic_ns
        self._wall = wall

    async def send(
        self,
        prompt: Sequence[int],
        begin: int,
        end: int,
        kv_addr_info: str,
        recv_rank: int,
        request_id: str,
    ) -> RemoteSendResult:
        """Compute the KV of prompt[begin:end] and put it where ``kv_addr_info`` says.

        begin, end: already resolved (not negative). Returns only when the receiver has every byte. Raises
        InvalidRequest, LeaseError (refused, expired), TransferFailed (receiver gone or silent), or what the engine
        raises; the receiver has then been told, so it does not wait.
        """
        raise NotImplementedError
