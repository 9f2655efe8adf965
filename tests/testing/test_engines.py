"""Model engines keep the rules of the verbs, and the ledger of who holds what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from microserving.errors import EngineUnavailable, InvalidRequest, KVExhausted, LeaseError, RequestConflict
from microserving.program import Request
from microserving.program.testing import collect, make_request
from microserving.protocol.generation import GenerationRequest, SamplingParams, StopParams
from microserving.testing.engines import EngineSettings, ModelCluster
from microserving.testing.faults import Fault, Stage
from microserving.testing.reference import next_token, output_of, text_of
from microserving.testing.virtual_time import run_virtual

Scenario = Callable[[ModelCluster], Coroutine[Any, Any, None]]


def on_engines(scenario: Scenario, plan: dict[int, Fault] | None = None, **settings: Any) -> None:
    async def main() -> None:
        await scenario(ModelCluster((1, 1, 0), EngineSettings(**settings), Stage(plan or {})))

    run_virtual(main())


def request(length: int = 40, **changes: Any) -> Request:
    return replace(make_request(range(length), max_tokens=8), **changes)


def test_the_reference_depends_on_prompt_seed_and_position() -> None:
    prompt = GenerationRequest("r", (5, 6, 7), SamplingParams(seed=1), StopParams(max_tokens=3))
    output = output_of(prompt)
    first = next_token([5, 6, 7], 1)
    assert output == (first, next_token([5, 6, 7, first], 1), next_token([5, 6, 7, *output[:2]], 1))
    assert output_of(replace(prompt, resume_output_ids=output[:2])) == output
    assert output != output_of(replace(prompt, sampling=SamplingParams(seed=2)))
    assert output != output_of(replace(prompt, prompt_token_ids=(5, 6, 8)))
    assert text_of([3, 40]) == " 3 40"


def test_a_hand_off_holds_pages_until_its_end() -> None:
    async def scenario(cluster: ModelCluster) -> None:
        prefill, decode = cluster["prefill-0"], cluster["decode-0"]
        received = await decode.prep_recv(request(), end=-1)
        assert (received.prefix_matched_length, received.end) == (0, 39)
        assert (decode.holds.pages, decode.load.free_pages, decode.load.reserved) == (3, 97, 1)
        with pytest.raises(RequestConflict):
            await decode.prep_recv(request(), end=3)
        with pytest.raises(InvalidRequest):
            await decode.prep_recv(request(request_id="other"), end=41)
        sent = await prefill.remote_send(request(), to=received)
        assert (sent.tokens_sent, prefill.holds.pages) == (39, 0)
        stream = decode.start_generate(request(), begin=39)
        chunks = [await anext(stream)]
        assert (decode.holds.names(), decode.holds.pages) == (["a generation"], 3)
        chunks += await collect(stream)
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == output_of(request())
        assert "".join(chunk.text for chunk in chunks) == text_of(output_of(request()))
        assert not decode.holds.names()
        assert (await decode.prep_recv(request(), end=-1)).complete  # it is cached now

    on_engines(scenario, pages=100)


def test_kv_of_another_prompt_gives_other_tokens() -> None:
    async def scenario(cluster: ModelCluster) -> None:
        received = await cluster["decode-0"].prep_recv(request(), end=-1)
        other = request(prompt_token_ids=tuple(range(1, 41)))
        await cluster["prefill-0"].remote_send(other, to=received)
        chunks = await collect(cluster["decode-0"].start_generate(request(), begin=39))
        assert chunks[0].token_ids[0] == next_token([*range(1, 40), 39], 0)

    on_engines(scenario)


def test_leases_end_unless_they_are_renewed() -> None:
    async def scenario(cluster: ModelCluster) -> None:
        decode = cluster["decode-0"]
        received = await decode.prep_recv(request(), end=-1)
        await asyncio.sleep(2.0)
        assert await decode.renew(request()) == 3.0
        await asyncio.sleep(2.0)
        assert decode.lease("request-0") is not None
        await asyncio.sleep(2.0)
        assert decode.lease("request-0") is None
        assert decode.expired == ["request-0"]
        with pytest.raises(LeaseError):
            await cluster["prefill-0"].remote_send(request(), to=received)
        with pytest.raises(LeaseError):
            await collect(decode.start_generate(request(), begin=39))
        assert not decode.holds.names()
        assert not cluster["prefill-0"].holds.names()

    on_engines(scenario, lease_ttl_s=3.0)


def test_a_full_pool_refuses() -> None:
    async def scenario(cluster: ModelCluster) -> None:
        decode = cluster["decode-0"]
        await decode.prep_recv(request(), end=-1)
        with pytest.raises(KVExhausted):
            await decode.prep_recv(request(request_id="other"), end=-1)
        await decode.abort(request())
        assert decode.holds.pages == 0

    on_engines(scenario, pages=4)


@pytest.mark.parametrize(
    ("fault", "held", "seconds"), [("broken", True, 0.001), ("dies", False, 0.001), ("frozen", True, 2.0)]
)
def test_what_an_engine_that_fails_still_holds(fault: Fault, held: bool, seconds: float) -> None:
    async def scenario(cluster: ModelCluster) -> None:
        decode = cluster["decode-0"]
        with pytest.raises(EngineUnavailable):
            await decode.prep_recv(request(), end=-1)
        assert bool(decode.holds.names()) == held
        assert asyncio.get_running_loop().time() == pytest.approx(seconds, abs=0.01)
        assert (decode in list(cluster.decode)) == (fault == "broken")

    on_engines(scenario, {0: fault})
