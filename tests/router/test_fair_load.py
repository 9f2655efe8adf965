"""Routing follows load: on engines in memory, in virtual time (seconds cost nothing)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from microserving.program import Chunks, Cluster, GenerationChunk, Program, Request
from microserving.program.testing import FakeCluster, FakeEngine

from .hosting import Hosted, generation
from .virtual_time import run_virtual

CLIENTS = 32
SERVICE_S = 0.1


class TimedEngine(FakeEngine):
    """A request takes service_s, whatever else runs. Of prompts it keeps the first kept tokens (a fake cache is searched
    one prompt after the other)."""

    service_s = SERVICE_S
    kept = 0

    def _computed(self, request: Request) -> None:
        self._cached.add((request.cache_salt, request.prompt_token_ids[: self.kept]))

    async def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        self._running.add(request.request_id)
        await asyncio.sleep(self.service_s)
        async for chunk in super().start_generate(request, begin=begin):
            yield chunk


class OneEngine(Program):
    policy: str = "least_loaded"

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        engine = cluster.decode.choose(self.policy, request)
        async for chunk in engine.start_generate(request):
            yield chunk


def shares(policy: str, *, seconds: float, prompt: int, unique: int) -> tuple[Counter[str], Counter[str]]:
    """Engine -> requests it began, and the most that it ran at once, of clients that ask again at once.

    decode-0 is three times slower. prompt: tokens that all have in common; unique: and those that nobody shares.
    """
    cluster = FakeCluster(prefill=0, decode=4)
    for engine in cluster.engines.values():
        engine.__class__ = TimedEngine
        engine.kept = prompt  # type: ignore[attr-defined]
    cluster["decode-0"].service_s = 3 * SERVICE_S  # type: ignore[attr-defined]
    most: Counter[str] = Counter()

    async def run() -> None:
        hosted = Hosted(OneEngine(policy=policy), cluster)
        loop = asyncio.get_running_loop()

        async def client(number: int) -> None:
            asked = 0
            while loop.time() < seconds:
                asked += 1
                first = 1000 * (number + 1) + asked
                tail = tuple(range(first, first + unique))
                request = generation(prompt, f"r{number}-{asked}")
                request = replace(request, prompt_token_ids=(*request.prompt_token_ids, *tail))
                async for _ in hosted.dispatcher.generate(request):
                    for engine, running in hosted.in_flight.items():
                        most[engine.id] = max(most[engine.id], running)

        await asyncio.gather(*map(client, range(CLIENTS)))
        await hosted.settle()

    run_virtual(run())
    begun = {e.id: sum(c.verb == "start_generate" for c in e.calls) for e in cluster.engines.values()}
    return Counter(begun), most


def test_a_slow_engine_gets_a_third_of_what_the_others_get() -> None:
    begun, _ = shares("least_loaded", seconds=6.0, prompt=20, unique=4)
    others = [begun[f"decode-{i}"] for i in (1, 2, 3)]
    assert max(others) - min(others) <= 0.1 * max(others)
    share = begun["decode-0"] / (sum(others) / 3)
    assert 0.25 <= share <= 0.45, begun  # equal numbers in flight, three times as long


@pytest.mark.case("RT-03")
def test_a_hot_prefix_does_not_overload_one_engine() -> None:
    begun, most = shares("prefix_aware", seconds=4.0, prompt=400, unique=8)
    fast = [begun[f"decode-{i}"] for i in (1, 2, 3)]
    assert sum(count > 0 for count in begun.values()) >= 2
    assert max(begun.values()) <= 1.5 * sum(begun.values()) / 4, begun
    assert max(most.values()) <= 1.5 * CLIENTS / 4, most
    assert min(fast) > 0
