"""What became of every request: who did what for it, how often it was tried, and why it was (not) disaggregated.

Owns the records of the requests that run and a bounded number of those that ended, and the totals. Engines are named by
their node ids; no address and nothing that a client sent is in here, but for the length of its prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from microserving.errors import MicroservingError
from microserving.program import EngineClient, EngineRole, RemoteSendResult

RequestState = Literal["waiting_for_prefill", "handoff_to_decode", "decoding", "complete"]
"""Until the prompt's K/V is where it is needed; until the first token; until the last one; ended, however."""


@dataclass(slots=True)
class AttemptRecord:
    """One run of the program. prefill, decode: the engines that sent K/V and that generated last; role: the latter's.

    prefix_matched_length: of the prompt, what the receiver had already. error: the code of what ended it.
    """

    program: str
    state: RequestState = "waiting_for_prefill"
    prefill: str | None = None
    decode: str | None = None
    role: EngineRole | None = None
    split_at: int | None = None
    prefix_matched_length: int = 0
    tokens_sent: int = 0
    bytes_sent: int = 0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    exposed_ms: float = 0.0
    error: str | None = None

    @property
    def why(self) -> str:
        """In words, why this attempt was, or was not, disaggregated."""
        if self.prefill is not None:
            return f"{self.prefill} computed the prompt up to {self.split_at}, {self.decode or 'nobody'} the rest"
        if self.split_at is None:
            return "the program asked for no hand-off"
        if self.prefix_matched_length >= self.split_at:
            return f"all {self.split_at} tokens to hand over were in the decode engine's cache"
        return "it ended before anything was handed over"

    def sending(self, engine: EngineClient) -> None:
        """``engine`` was asked to send."""
        self.prefill = engine.id

    def sent(self, result: RemoteSendResult) -> None:
        """The K/V is in place."""
        self.tokens_sent += result.tokens_sent
        self.bytes_sent += result.bytes_sent
        self.prefill_ms += result.prefill_ms
        self.transfer_ms += result.transfer_ms
        self.exposed_ms += result.exposed_ms
        self.state = "handoff_to_decode"

    def generating(self, engine: EngineClient) -> None:
        """``engine`` was asked to generate."""
        self.decode, self.role = engine.id, engine.role
        self.state = "handoff_to_decode"


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. started: Unix time. Durations in seconds; ttft_s and duration_s None until it is so far.

    retries: attempts after the first one that began before the first token; resumes: those after it; hedges: those made
    beside another. outcome: ``ok``, ``cancelled`` or an error's code.
    """

    request_id: str
    prompt_tokens: int
    started: float
    began: float
    attempts: list[AttemptRecord] = field(default_factory=list)
    retries: int = 0
    resumes: int = 0
    hedges: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None
    duration_s: float | None = None
    outcome: str | None = None

    @property
    def state(self) -> RequestState:
        if self.duration_s is not None:
            return "complete"
        if self.ttft_s is not None:
            return "decoding"
        return self.attempts[-1].state if self.attempts else "waiting_for_prefill"

    @property
    def itl_s(self) -> float | None:
        """Mean time between two output tokens; None while there are fewer than two, or it runs."""
        if self.ttft_s is None or self.duration_s is None or self.output_tokens < 2:
            return None
        return (self.duration_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(slots=True)
class TransferTotals:
    """What `remote_send` did for the requests that ended (``RemoteSendResult`` defines the times). hand_offs: that moved
    something."""

    hand_offs: int = 0
    tokens_sent: int = 0
    bytes_sent: int = 0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    exposed_ms: float = 0.0

    def add(self, attempt: AttemptRecord) -> None:
        self.hand_offs += attempt.tokens_sent > 0
        self.tokens_sent += attempt.tokens_sent
        self.bytes_sent += attempt.bytes_sent
        self.prefill_ms += attempt.prefill_ms
        self.transfer_ms += attempt.transfer_ms
        self.exposed_ms += attempt.exposed_ms


@dataclass(slots=True)
class Totals:
    """Since the router started. outcomes: ended requests by ``RequestRecord.outcome``."""

    requests: int = 0
    retries: int = 0
    resumes: int = 0
    hedges: int = 0
    output_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    transfers: TransferTotals = field(default_factory=TransferTotals)


class Ledger:
    """size: how many ended requests are remembered. on_ended: called with every request that ended (a metrics window).

    Needs a running loop.
    """

    def __init__(self, size: int = 256, clock: Callable[[], float] = time.time) -> None:
        self.totals = Totals()
        self.on_ended: Callable[[RequestRecord], None] | None = None
        self._clock = clock
        self._running: dict[int, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=size)

    def __len__(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def states(self) -> Counter[RequestState]:
        """How many of the running requests are in which state."""
        return Counter(record.state for record in self._running.values())

    @property
    def records(self) -> Iterator[RequestRecord]:
        """Those that run, then those that ended; the newest first."""
        yield from reversed(self._running.values())
        yield from reversed(self._ended)

    def open(self, request_id: str, prompt_tokens: int) -> RequestRecord:
        """A request came."""
        began = asyncio.get_running_loop().time()
        record = RequestRecord(request_id, prompt_tokens, self._clock(), began)
        self._running[id(record)] = record
        self.totals.requests += 1
        return record

    def close(self, record: RequestRecord, error: BaseException | None, *, finished: bool) -> None:
        """It ended: with ``error``, or else ``finished``, or else because its client left."""
        record.duration_s = asyncio.get_running_loop().time() - record.began
        if isinstance(error, MicroservingError):
            record.outcome = error.code or "internal_error"
        else:
            record.outcome = "ok" if finished else "cancelled"
        del self._running[id(record)]
        self._ended.append(record)
        totals = self.totals
        totals.outcomes[record.outcome] += 1
        totals.retries += record.retries
        totals.resumes += record.resumes
        totals.hedges += record.hedges
        totals.output_tokens += record.output_tokens
        for attempt in record.attempts:
            totals.transfers.add(attempt)
        if self.on_ended is not None:
            self.on_ended(record)
