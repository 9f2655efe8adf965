"""Engines of the kit: what they hold for whom (reservations, sends, generations, pages, leases), on virtual time.

They keep the rules that real engines keep, take time for what they do, and fail as the run's ``Stage`` says. What a real
engine would free by itself because a connection breaks stays here until the host aborts it, or its lease ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from microserving.errors import (
    EngineUnavailable,
    InvalidRequest,
    KVExhausted,
    LeaseError,
    MicroservingError,
    RequestConflict,
    TransferFailed,
)
from microserving.policies import EngineLoad
from microserving.program import (
    NOTHING_SENT,
    ClusterMetrics,
    EngineClient,
    EngineRole,
    GenerationChunk,
    Received,
    RemoteSendResult,
    Request,
)
from microserving.program.testing import ClusterInMemory, EngineInMemory, common_prefix
from microserving.protocol.generation import FinishReason
from microserving.testing.faults import Fault, Stage
from microserving.testing.holds import Holds, Lease, pages_of
from microserving.testing.reference import holds_back, length_of, next_token, score_of, text_of


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """pages: of each engine's KV pool. Seconds (virtual): answer_s: of any verb; prefill_token_s, token_s: of one token
    of the prompt, or of the output. lease_ttl_s: of reservations. slow_s: how late a slow answer is. given_up_s: until
    probes give up an engine that stopped.
    """

    pages: int = 1024
    answer_s: float = 0.001
    prefill_token_s: float = 0.0001
    token_s: float = 0.01
    lease_ttl_s: float = 3.0
    slow_s: float = 4.0
    given_up_s: float = 2.0


class ModelEngine(EngineInMemory):
    """state: ``up``; ``frozen``: answers nothing; ``gone``: died, or was given up. expired: reservations that nobody gave
    back, by request id."""

    def __init__(self, engine_id: str, role: EngineRole, cluster: ModelCluster) -> None:
        super().__init__(engine_id, role)
        self.holds = Holds()
        self.expired: list[str] = []
        self.cached: list[tuple[str, tuple[int, ...]]] = []
        self.state = "up"
        self.failing: MicroservingError | None = None
        self._cluster = cluster
        self._settings = cluster.settings
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def in_flight(self) -> int:
        return self._cluster.in_flight(self)

    @property
    def load(self) -> EngineLoad:
        holds, total = self.holds, self._settings.pages
        return EngineLoad(
            running=len(holds.generations) + len(holds.sends),
            reserved=len(holds.leases),
            free_pages=total - holds.pages,
            total_pages=total,
            prefill_tokens_per_s=1 / self._settings.prefill_token_s,
            decode_step_ms=1000 * self._settings.token_s,
            decode_base_ms=1000 * self._settings.token_s,
        )

    async def prep_recv(self, request: Request, *, end: int) -> Received:
        fault = await self._begin("prep_recv", request)
        if fault == "slow":  # it waits for free pages
            await self._wait(self._settings.slow_s)
            fault = None
        end = _resolved("end", end, request)
        if request.request_id in self.holds.leases:
            raise RequestConflict("the request id is in use", param="request_id")
        self._take_pages(pages_of(end))
        matched = min(self.matched(request), end)
        expires = self._loop.time() + self._settings.lease_ttl_s
        lease = Lease(end, expires, request.prompt_token_ids[:matched], arrived=matched == end)
        self.holds.leases[request.request_id] = lease
        await self._answer(fault)
        address = f"{self.id}/{request.request_id}"
        return Received(address, matched, end, self, lease_ttl_s=self._settings.lease_ttl_s)

    async def remote_send(self, request: Request, *, to: Received) -> RemoteSendResult:
        if to.complete:
            return NOTHING_SENT
        engine_id, _, request_id = to.kv_append_metadata.partition("/")
        receiver = self._cluster[engine_id]
        fault = await self._begin("remote_send", request)
        if fault == "lease_lost":
            receiver.holds.leases.pop(request_id, None)
        own, count = request.request_id, to.end - to.prefix_matched_length
        self.holds.sends[own] = self._take_pages(pages_of(to.end))
        await self._wait(count * self._settings.prefill_token_s, receiver)
        lease = receiver.lease(request_id)
        if lease is None or fault == "transfer_fails":
            self.holds.sends.pop(own, None)
            raise TransferFailed("told to fail") if lease else LeaseError("the reservation is gone")
        lease.tokens = (
            lease.tokens[: to.prefix_matched_length]
            + request.prompt_token_ids[to.prefix_matched_length : to.end]
        )
        lease.arrived = len(lease.tokens) >= lease.end
        if fault != "silent":
            self.holds.sends.pop(own, None)
        self._remember(request.cache_salt, request.prompt_token_ids[: to.end])
        await self._answer(fault, receiver)
        return replace(NOTHING_SENT, tokens_computed=count, tokens_sent=count)

    async def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        fault = await self._begin("start_generate", request)
        begin = _resolved("begin", begin, request)
        if fault in ("lease_lost", "transfer_fails"):
            self.holds.leases.pop(request.request_id, None)
        own, lease = request.request_id, self.lease(request.request_id)
        if begin and (lease is None or not lease.arrived or lease.end < begin):
            self.holds.leases.pop(own, None)
            raise (
                LeaseError("the K/V did not arrive")
                if fault != "transfer_fails"
                else TransferFailed("no K/V")
            )
        if own in self.holds.generations:
            raise RequestConflict("the request id is in use", param="request_id")
        self.holds.leases.pop(own, None)
        prompt = (*(lease.tokens[:begin] if lease else ()), *request.prompt_token_ids[begin:])
        self.holds.generations[own] = self._take_pages(pages_of(len(prompt) + length_of(request)))
        cached = max(begin, min(self.matched(request), len(prompt) - 1))
        await self._wait((len(prompt) - cached) * self._settings.prefill_token_s)
        self._remember(request.cache_salt, prompt)
        if fault not in ("lease_lost", "transfer_fails"):
            await self._answer(fault)
        async for chunk in self._tokens(request, prompt):
            yield replace(chunk, cached_tokens=0 if begin else cached)

    async def _tokens(self, request: Request, prompt: Sequence[int]) -> AsyncIterator[GenerationChunk]:
        """The output behind ``resume_output_ids``; texts that are held back come with the next token's."""
        output, total = list(request.resume_output_ids), length_of(request)
        held: list[int] = []
        while True:
            last = len(output) + 1 >= total
            if len(output) < total:
                if await self._next_token(request, len(output) + 1):
                    self.holds.generations.pop(request.request_id, None)
                    yield GenerationChunk("", (), "preempt", len(prompt), len(output))
                    return
                output.append(next_token([*prompt, *output], request.sampling.seed))
                held.append(output[-1])
            if last:
                self.holds.generations.pop(request.request_id, None)
            if last or not holds_back(output[-1]):
                finish: FinishReason | None = "length" if last else None
                scores = () if request.logprobs is None else tuple(map(score_of, held))
                yield GenerationChunk(
                    text_of(held), tuple(held), finish, len(prompt), len(output), logprobs=scores
                )
                held = []
            if last:
                return

    async def _next_token(self, request: Request, number: int) -> bool:
        """Compute it. Whether the generation is given back instead."""
        fault = await self._begin("chunk", request, f"token {number}")
        if request.request_id not in self.holds.generations:
            raise EngineUnavailable("the generation was aborted")
        await self._answer(fault, seconds=self._settings.token_s)
        return fault == "preempted"

    async def commit(self, request: Request) -> int:
        fault = await self._begin("commit", request)
        if fault == "lease_lost":
            self.holds.leases.pop(request.request_id, None)
        lease = self.lease(request.request_id)
        if lease is None or not lease.arrived:
            raise LeaseError("there is nothing to commit")
        del self.holds.leases[request.request_id]
        self._remember(request.cache_salt, lease.tokens)
        await self._answer(fault)
        return len(lease.tokens)

    async def abort(self, request: Request) -> None:
        """A moment only where the program asks for it; the host's clean-up is not what is tried here."""
        fault = None
        if self._cluster.stage.line_of("") is not None:
            fault = await self._begin("abort", request)
        await self._reach()
        self.holds.drop(request.request_id)
        await self._answer(fault)

    async def renew(self, request: Request) -> float | None:
        await self._reach()
        lease = self.lease(request.request_id)
        if lease is None:
            raise LeaseError("there is no reservation of this request")
        lease.expires = self._loop.time() + self._settings.lease_ttl_s
        await self._wait(self._settings.answer_s)
        return self._settings.lease_ttl_s

    async def match_prefix(self, request: Request) -> int:
        fault = await self._begin("match_prefix", request)
        await self._answer(fault)
        return self.matched(request)

    def matched(self, request: Request) -> int:
        """How many leading prompt tokens are cached."""
        own = (tokens for salt, tokens in self.cached if salt == request.cache_salt)
        return max((common_prefix(tokens, request.prompt_token_ids) for tokens in own), default=0)

    def lease(self, request_id: str) -> Lease | None:
        """The live reservation of a request."""
        self.expire()
        return self.holds.leases.get(request_id)

    def expire(self) -> None:
        """End the leases whose time is over. Idempotent."""
        now = self._loop.time()
        for request_id in [key for key, lease in self.holds.leases.items() if lease.expires < now]:
            del self.holds.leases[request_id]
            self.expired.append(request_id)

    def die(self) -> None:
        """The process is gone, and all that it held; its connections break. Idempotent."""
        self.holds = Holds()
        self._give_up()

    def freeze(self) -> None:
        """Answer nothing more; probes find out."""
        self.state = "frozen"
        self._loop.call_later(self._settings.given_up_s, self._give_up)

    def _give_up(self) -> None:
        self.state, self.up = "gone", False
        if not self._gone.done():
            self._gone.set_result(None)

    async def _begin(self, verb: str, request: Request, detail: str = "") -> Fault | None:
        """A call reaches the engine. Returns the fault that is still to come."""
        fault = self._cluster.stage.enter(self.id, verb, request.request_id, detail)
        await self._reach()
        if verb != "chunk":
            await self._wait(self._settings.answer_s)
        if fault == "refused":
            raise EngineUnavailable(f"{self.id} refused")
        if fault == "exhausted":
            self.holds.drop(request.request_id)  # an engine that says so has ended what it did
            raise KVExhausted("not enough free KV pages")
        if fault == "all_exhausted":
            self._cluster.fail_all(KVExhausted("not enough free KV pages"))
        if fault == "all_die":
            self._cluster.kill_all()
            raise self._unavailable()
        if self.failing is not None and verb != "chunk":
            raise self.failing
        return fault

    async def _answer(
        self, fault: Fault | None, receiver: ModelEngine | None = None, *, seconds: float = 0.0
    ) -> None:
        """What was asked for is done; the answer is on its way."""
        if fault == "broken":
            raise EngineUnavailable(f"{self.id} broke the connection")
        if fault == "dies":
            self.die()
        elif fault == "frozen":
            self.freeze()
        if fault in ("silent", "frozen"):
            await self._wait(None, receiver)
        late = self._settings.slow_s if fault == "slow" else 0.0
        await self._wait(seconds + late, receiver)

    async def _reach(self) -> None:
        if self.state != "up":
            await self._wait(None)

    async def _wait(self, seconds: float | None, receiver: ModelEngine | None = None) -> None:
        """Raises EngineUnavailable as soon as the engine, or the receiver of its transfer, is gone. None: for ever."""
        gone = {self._gone} if receiver is None else {self._gone, receiver._gone}
        await asyncio.wait(gone, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._gone.done():
            raise self._unavailable()
        if receiver is not None and receiver._gone.done():
            raise receiver._unavailable()

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable(f"{self.id} cannot be reached")

    def _take_pages(self, count: int) -> int:
        if self.holds.pages + count > self._settings.pages:
            raise KVExhausted("not enough free KV pages")
        return count

    def _remember(self, salt: str, tokens: Sequence[int]) -> None:
        self.cached.append((salt, tuple(tokens)))


class ModelCluster(ClusterInMemory[ModelEngine]):
    """``prefill-0``, ``prefill-1``, ..., ``decode-0``, ..., ``hybrid-0``, ...; one that is gone is in no pool. Needs a
    running loop. counts: of prefill, decode and hybrid engines."""

    def __init__(self, counts: tuple[int, int, int], settings: EngineSettings, stage: Stage) -> None:
        self.settings = settings
        self.stage = stage
        self.in_flight_counts: dict[EngineClient, int] = {}
        roles: tuple[EngineRole, ...] = ("prefill", "decode", "hybrid")
        engines = {
            f"{role}-{number}": ModelEngine(f"{role}-{number}", role, self)
            for role, count in zip(roles, counts, strict=True)
            for number in range(count)
        }
        clock = asyncio.get_running_loop().time
        super().__init__(engines, metrics=ClusterMetrics(clock), clock=clock)

    def in_flight(self, engine: EngineClient) -> int:
        return self.in_flight_counts.get(engine, 0)

    def kill_all(self) -> None:
        for engine in self.engines.values():
            engine.die()

    def fail_all(self, error: MicroservingError) -> None:
        """Every verb of every engine raises ``error`` from now on."""
        for engine in self.engines.values():
            engine.failing = error


def _resolved(name: str, index: int, request: Request) -> int:
    length = request.prompt_length
    resolved = index + length if index < 0 else index
    if not 0 <= resolved <= length:
        raise InvalidRequest(f"{name} is {index}, but the prompt has {length} tokens", param=name)
    return resolved
