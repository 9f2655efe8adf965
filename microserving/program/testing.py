"""Engines in memory, for tests of router programs: no process, no model, no network.

    cluster = FakeCluster(prefill=1, decode=2)
    chunks = asyncio.run(collect(PrefillDecode().route(make_request(range(20)), cluster)))
    assert cluster["prefill-0"].calls == [Call("remote_send", "request-0", 0, 19)]

The engines keep the rules of the verbs: K/V that did not arrive cannot be generated from, an id that is in use is
refused. What a program leaves on them is what the router's host would abort.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from microserving.errors import InvalidRequest, LeaseError, MicroservingError, RequestConflict
from microserving.policies import EngineLoad
from microserving.program.cluster import Cluster
from microserving.program.engine_client import NOTHING_SENT, EngineClient, EngineRole, Received
from microserving.program.metrics import ClusterMetrics
from microserving.program.request import Request
from microserving.protocol.generation import GenerationChunk, RemoteSendResult, SamplingParams, StopParams


@dataclass(frozen=True, slots=True)
class Call:
    """One verb that was called, with its window over the prompt."""

    verb: str
    request_id: str
    begin: int = 0
    end: int = 0


@dataclass(slots=True)
class _Reservation:
    end: int
    arrived: bool


class EngineInMemory(EngineClient):
    """What all engines without a process have. up: whether it is in its pools."""

    def __init__(self, engine_id: str, role: EngineRole) -> None:
        self.up = True
        self._id = engine_id
        self._role: EngineRole = role

    @property
    def id(self) -> str:
        return self._id

    @property
    def role(self) -> EngineRole:
        return self._role

    @role.setter
    def role(self, role: EngineRole) -> None:
        self._role = role


EngineT = TypeVar("EngineT", bound=EngineInMemory)


class ClusterInMemory(Cluster, Generic[EngineT]):
    """``cluster[id]`` is an engine; one that is not ``up`` is in no pool. ``set_role`` works."""

    def __init__(
        self,
        engines: Mapping[str, EngineT],
        *,
        metrics: ClusterMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engines = engines
        super().__init__(
            prefill=lambda: self._up("decode"),
            decode=lambda: self._up("prefill"),
            all=lambda: self._up(None),
            set_role=self._give_role,
            metrics=metrics,
            clock=clock,
        )

    def __getitem__(self, engine_id: str) -> EngineT:
        return self.engines[engine_id]

    def _up(self, other: EngineRole | None) -> list[EngineClient]:
        """The live engines, but for those whose only role is ``other``."""
        return [engine for engine in self.engines.values() if engine.up and engine.role != other]

    async def _give_role(self, engine_id: str, role: EngineRole) -> None:
        self.engines[engine_id].role = role


class FakeEngine(EngineInMemory):
    """Answers every generation with ``output``, one chunk a piece, the last one with finish_reason ``stop``.

    matched: the prefix length that ``prep_recv`` and ``match_prefix`` report (clamped to what is asked for), when the
    fake cache has no more of it: that holds what was committed and, with caching, every prompt that was computed here.
    failures: verb -> the exception that it raises, before it does anything. lease_ttl_s: what ``prep_recv`` and
    ``renew`` say; leases never expire by themselves, and None stands for an engine without ``renew``. Both may be set
    at any time, as may load.
    """

    def __init__(
        self,
        engine_id: str,
        role: EngineRole,
        *,
        output: Sequence[str] = ("Hello", " world"),
        matched: int = 0,
    ) -> None:
        super().__init__(engine_id, role)
        self.output = tuple(output)
        self.matched = matched
        self.caching = False
        self.calls: list[Call] = []
        self.failures: dict[str, MicroservingError] = {}
        self.lease_ttl_s: float | None = 30.0
        self._load = EngineLoad()
        self._peers: dict[str, FakeEngine] = {engine_id: self}
        self._reservations: dict[str, _Reservation] = {}
        self._running: set[str] = set()
        self._cached: set[tuple[str, tuple[int, ...]]] = set()

    @property
    def in_flight(self) -> int:
        return len(self.held)

    @property
    def load(self) -> EngineLoad:
        return self._load

    @load.setter
    def load(self, load: EngineLoad) -> None:
        self._load = load

    @property
    def held(self) -> frozenset[str]:
        """Ids of the requests that have a reservation, or run, on the engine."""
        return frozenset(self._reservations) | self._running

    async def prep_recv(self, request: Request, *, end: int) -> Received:
        length = request.prompt_length
        end = end + length if end < 0 else end
        await self._called("prep_recv", request, 0, end)
        if not 0 <= end <= length:
            raise InvalidRequest(f"end is {end}, but the prompt has {length} tokens", param="end")
        if request.request_id in self.held:
            raise RequestConflict("the request id is in use", param="request_id")
        matched = min(self.cached(request), end)
        self._reservations[request.request_id] = _Reservation(end, arrived=matched == end)
        await asyncio.sleep(0)
        return Received(f"{self.id}/{request.request_id}", matched, end, self, lease_ttl_s=self.lease_ttl_s)

    async def remote_send(self, request: Request, *, to: Received) -> RemoteSendResult:
        if to.complete:
            return NOTHING_SENT
        await self._called("remote_send", request, to.prefix_matched_length, to.end)
        receiver, _, request_id = to.kv_append_metadata.partition("/")
        self._running.add(request.request_id)
        await asyncio.sleep(0)
        self._running.discard(request.request_id)
        reservation = self._peers[receiver]._reservations.get(request_id)
        if reservation is None:
            raise LeaseError("the reservation is gone")
        reservation.arrived = True
        self._computed(request)
        sent = to.end - to.prefix_matched_length
        return replace(NOTHING_SENT, tokens_computed=sent, tokens_sent=sent)

    async def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        await self._called("start_generate", request, begin, request.prompt_length)
        reservation = self._reservations.get(request.request_id)
        if begin > 0 and (reservation is None or not reservation.arrived):
            raise LeaseError("the K/V did not arrive")
        self._reservations.pop(request.request_id, None)
        self._running.add(request.request_id)
        cached = max(0, min(self.cached(request), request.prompt_length - 1))
        self._computed(request)
        for number, text in enumerate(self.output, start=1):
            if number <= len(request.resume_output_ids):
                continue  # given out elsewhere already
            await asyncio.sleep(0)
            last = number == len(self.output)
            if last:
                self._running.discard(request.request_id)
            yield GenerationChunk(
                text=text,
                token_ids=(number,),
                finish_reason="stop" if last else None,
                prompt_tokens=request.prompt_length,
                completion_tokens=number,
                cached_tokens=cached,
            )

    async def commit(self, request: Request) -> int:
        await self._called("commit", request)
        reservation = self._reservations.get(request.request_id)
        if reservation is None or not reservation.arrived:
            raise LeaseError("there is nothing to commit")
        del self._reservations[request.request_id]
        self._cached.add((request.cache_salt, request.prompt_token_ids[: reservation.end]))
        return reservation.end

    async def abort(self, request: Request) -> None:
        await self._called("abort", request)
        self._reservations.pop(request.request_id, None)
        self._running.discard(request.request_id)

    async def renew(self, request: Request) -> float | None:
        await self._called("renew", request)
        if self.lease_ttl_s is not None and request.request_id not in self.held:
            raise LeaseError("there is no reservation of this request")
        return self.lease_ttl_s

    async def match_prefix(self, request: Request) -> int:
        await self._called("match_prefix", request)
        return self.cached(request)

    def cached(self, request: Request) -> int:
        """How many leading prompt tokens are in the fake cache."""
        prompt = request.prompt_token_ids
        own = (tokens for salt, tokens in self._cached if salt == request.cache_salt)
        held = max((common_prefix(tokens, prompt) for tokens in own), default=0)
        return min(max(held, self.matched), len(prompt))

    def _computed(self, request: Request) -> None:
        if self.caching:
            self._cached.add((request.cache_salt, request.prompt_token_ids))

    async def _called(self, verb: str, request: Request, begin: int = 0, end: int = 0) -> None:
        self.calls.append(Call(verb, request.request_id, begin, end))
        await asyncio.sleep(0)
        if verb in self.failures:
            raise self.failures[verb]


class FakeCluster(ClusterInMemory[FakeEngine]):
    """``prefill-0``, ``prefill-1``, ..., ``decode-0``, ...; an engine whose ``up`` is False is in no pool.

    ``set_role`` works; ``metrics`` has the latencies that the test puts there. caching: of all engines.
    """

    def __init__(self, *, prefill: int = 1, decode: int = 1, caching: bool = False) -> None:
        prefills = [FakeEngine(f"prefill-{i}", "prefill") for i in range(prefill)]
        decodes = [FakeEngine(f"decode-{i}", "decode") for i in range(decode)]
        engines = {engine.id: engine for engine in [*prefills, *decodes]}
        for engine in engines.values():
            engine._peers, engine.caching = engines, caching
        super().__init__(engines)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(engine id, verb) of every call, engine by engine."""
        return [(engine.id, call.verb) for engine in self.engines.values() for call in engine.calls]


def make_request(
    prompt_token_ids: Iterable[int],
    *,
    request_id: str = "request-0",
    max_tokens: int | None = None,
    cache_salt: str = "",
) -> Request:
    """A request with greedy sampling."""
    return Request(
        request_id,
        tuple(prompt_token_ids),
        SamplingParams(temperature=0.0),
        StopParams(max_tokens=max_tokens),
        cache_salt=cache_salt,
    )


async def collect(chunks: AsyncIterator[GenerationChunk]) -> list[GenerationChunk]:
    """All of ``chunks``."""
    return [chunk async for chunk in chunks]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
