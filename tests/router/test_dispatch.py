"""A request survives what its engines do: the client sees each token once, whatever fails when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from microserving.errors import (
    EngineUnavailable,
    InvalidRequest,
    KVExhausted,
    MicroservingError,
    NoEngine,
    ShuttingDown,
    TransferFailed,
)
from microserving.program import Cluster, GenerationChunk, Request
from microserving.program.testing import FakeEngine, collect
from microserving.protocol.generation import StopParams
from microserving.router.dispatch import DispatchSettings
from microserving.router.program_loader import LoadedProgram, shipped_programs
from microserving.router.retries import RetrySettings

from .dispatching import Custom, assert_whole, ids, run, served
from .faults import IDS, OUTPUT, Fault, FaultyCluster, Script
from .hosting import QUICK, Hosted, generation

FAULTS: tuple[Fault, ...] = get_args(Fault)


SETTINGS: dict[str, dict[str, object]] = {
    "balanced_prefill_decode": {"pd_balance_factor": 0.5},
    "adaptive": {"apart": True},
}


@pytest.mark.case("RT-04")
@pytest.mark.case("RT-06")
@pytest.mark.case("PD-05")
@pytest.mark.case("PD-34")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("program", shipped_programs())
def test_a_fault_at_every_moment_is_not_seen(program: str, fault: Fault) -> None:
    """One engine of the role lives: before and after each verb, at each token, the client sees nothing of it."""

    async def scenario() -> None:
        settings = SETTINGS.get(program, {})
        calm = Script()
        assert_whole((await served(program, calm, **settings))[0])
        assert len(calm.moments) >= 1 + len(OUTPUT)
        for at in range(len(calm.moments)):
            script = Script(at, fault)
            chunks, hosted = await served(program, script, **settings)
            assert script.met is not None
            assert_whole(chunks)
            (record,) = hosted.dispatcher.ledger.records
            assert (record.outcome, record.output_tokens) == ("ok", len(OUTPUT))
            failed = len(record.attempts) - 1
            assert record.retries + record.resumes == failed
            assert failed == 1 or calm.moments[at][1].startswith("match_prefix")  # a program may do without

    run(scenario)


def test_a_resumed_attempt_is_asked_for_the_rest_only() -> None:
    async def scenario() -> None:
        moments = Script()
        await served("prefill_decode", moments)
        at = moments.moments.index(("decode-0", "chunk 6"))
        seen: list[Request] = []
        hosted = Hosted("prefill_decode", FaultyCluster(Script(at, "dead")))
        generate = FakeEngine.start_generate

        def noted(self: FakeEngine, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
            seen.append(request)
            return generate(self, request, begin=begin)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeEngine, "start_generate", noted)
            assert_whole(await collect(hosted.dispatcher.generate(generation())))
        await hosted.settle()
        first, second = seen
        assert first.resume_output_ids == ()
        assert second.resume_output_ids == (1, 2, 3, 4)  # 5 and 6 were held back, and never sent
        assert second.request_id != first.request_id
        assert second.sampling == first.sampling
        (record,) = hosted.dispatcher.ledger.records
        assert [(a.prefill, a.decode, a.error) for a in record.attempts] == [
            ("prefill-0", "decode-0", "engine_unavailable"),
            ("prefill-1", "decode-1", None),
        ]
        assert (record.retries, record.resumes) == (0, 1)

    run(scenario)


def test_a_request_that_resumes_something_itself_is_resumed() -> None:
    async def scenario() -> None:
        hosted = Hosted("round_robin", FaultyCluster(Script(3, "dead")))
        request = replace(generation(), resume_output_ids=(1, 2))
        chunks = await collect(hosted.dispatcher.generate(request))
        assert ids(chunks) == IDS[2:]
        assert chunks[-1].completion_tokens == len(IDS)
        await hosted.settle()

    run(scenario)


def test_attempts_are_bounded() -> None:
    async def scenario() -> None:
        for attempts in (1, 2, 3):
            settings = replace(QUICK, retries=RetrySettings(max_attempts=attempts, backoff_s=0.0))
            hosted = Hosted("prefill_decode", FaultyCluster(), settings)
            for engine in hosted.cluster.engines.values():
                engine.failures["remote_send"] = TransferFailed("lost")
            with pytest.raises(TransferFailed):
                await collect(hosted.dispatcher.generate(generation()))
            verbs = [verb for _, verb in hosted.cluster.calls]
            assert verbs.count("remote_send") == attempts
            await hosted.settle()
            (record,) = hosted.dispatcher.ledger.records
            assert (record.outcome, record.retries) == ("transfer_failed", attempts - 1)

    run(scenario)


def test_a_request_that_brings_engines_down_does_not_see_them_all() -> None:
    """Each engine gives one token more and dies: there is an end to it."""

    async def scenario() -> None:
        hosted = Hosted("round_robin", FaultyCluster(decode=10))
        generate = FakeEngine.start_generate

        async def one_token(
            self: FakeEngine, request: Request, *, begin: int = 0
        ) -> AsyncIterator[GenerationChunk]:
            async for chunk in generate(self, request, begin=begin):
                yield replace(chunk, text="x")
                raise EngineUnavailable("killed by it")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeEngine, "start_generate", one_token)
            for engine in hosted.cluster.engines.values():
                engine.output = ("x",) * 100
            with pytest.raises(EngineUnavailable):
                await collect(hosted.dispatcher.generate(generation()))
        assert len(hosted.cluster.calls) <= 2 * (RetrySettings().max_resumes + 1)
        await hosted.settle()

    run(scenario)


def test_a_sick_cluster_is_not_hammered() -> None:
    """With a burst of 10 and a share of a tenth, 100 requests that all fail make 100 + 10 + 10 attempts."""

    async def scenario() -> None:
        retries = RetrySettings(budget_share=0.1, budget_burst=10, backoff_s=0.0)
        hosted = Hosted("round_robin", FaultyCluster(), replace(QUICK, retries=retries))
        for engine in hosted.cluster.engines.values():
            engine.failures["start_generate"] = EngineUnavailable("sick")
        for number in range(100):
            with pytest.raises(EngineUnavailable):
                await collect(hosted.dispatcher.generate(generation(request_id=f"r{number}")))
        starts = [verb for _, verb in hosted.cluster.calls].count("start_generate")
        assert 118 <= starts <= 120
        await hosted.settle()

    run(scenario)


def test_a_retry_that_the_budget_refused_is_none() -> None:
    async def scenario() -> None:
        retries = RetrySettings(budget_share=0.0, budget_burst=0, backoff_s=0.0)
        hosted = Hosted("round_robin", FaultyCluster(), replace(QUICK, retries=retries))
        for engine in hosted.cluster.engines.values():
            engine.failures["start_generate"] = EngineUnavailable("gone")
        with pytest.raises(EngineUnavailable):
            await collect(hosted.dispatcher.generate(generation()))
        (record,) = hosted.dispatcher.ledger.records
        assert (record.retries, len(record.attempts)) == (0, 1)
        await hosted.settle()

    run(scenario)


def test_a_full_engine_is_not_asked_twice() -> None:
    """Another one may have room; when none has, the client hears of the first one's Retry-After."""

    async def scenario() -> None:
        hosted = Hosted("prefill_decode", FaultyCluster())
        for name in ("decode-0", "decode-1"):
            hosted.cluster[name].failures["prep_recv"] = KVExhausted(f"{name} is full", retry_after_s=7.0)
        with pytest.raises(KVExhausted, match="is full") as caught:
            await collect(hosted.dispatcher.generate(generation()))
        assert caught.value.retry_after_s == 7.0
        asked = [engine for engine, verb in hosted.cluster.calls if verb == "prep_recv"]
        assert sorted(asked) == ["decode-0", "decode-1"]
        assert hosted.served.refreshes == 0  # who is full is there: nobody has to be looked for
        await hosted.settle()

    run(scenario)


def test_an_output_that_has_begun_is_tried_again_on_a_full_engine() -> None:
    """There is no other one, and its client has seen a part."""

    async def scenario() -> None:
        cluster = FaultyCluster(Script(3, "full"), prefill=0, decode=1)
        hosted = Hosted("round_robin", cluster)
        assert_whole(await collect(hosted.dispatcher.generate(generation())))
        assert [verb for _, verb in cluster.calls] == ["start_generate", "start_generate"]
        await hosted.settle()

    run(scenario)


@pytest.mark.parametrize("error", [InvalidRequest("no", param="stop"), ShuttingDown()])
def test_what_no_other_engine_would_do_better(error: MicroservingError) -> None:
    """A refusal of the request itself; any failure once the router stops."""

    async def scenario() -> None:
        hosted = Hosted("round_robin", FaultyCluster())
        for engine in hosted.cluster.engines.values():
            engine.failures["start_generate"] = error
        if isinstance(error, ShuttingDown):
            running = hosted.dispatcher.generate(generation())
            first = asyncio.ensure_future(anext(running))
            await asyncio.sleep(0)
            hosted.dispatcher.refuse_requests()
            with pytest.raises(ShuttingDown):
                await first
        else:
            with pytest.raises(InvalidRequest):
                await collect(hosted.dispatcher.generate(generation()))
        assert len(hosted.cluster.calls) == 1
        await hosted.settle()

    run(scenario)


async def breaks(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
    yield GenerationChunk("", (), None)
    raise ZeroDivisionError


def test_a_broken_new_version_fails_nobody() -> None:
    """The version before it serves those that it fails, and is in charge again after a few."""

    async def scenario() -> None:
        hosted = Hosted("round_robin", FaultyCluster())
        hosted.host.switch(LoadedProgram("broken", Path(__file__), 1, Custom(breaks)))
        for number in range(6):
            chunks = await collect(hosted.dispatcher.generate(generation(request_id=f"r{number}")))
            assert_whole([chunk for chunk in chunks if chunk.text])
        assert hosted.host.program.name == "round_robin"
        assert hosted.host.rollbacks == 1
        await hosted.settle()

    run(scenario)


@pytest.mark.case("PD-34")
def test_what_an_engine_gives_back_goes_on_elsewhere() -> None:
    attempts: list[tuple[int, ...]] = []

    async def given_back(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
        attempts.append(request.resume_output_ids)
        async for chunk in cluster.all.round_robin().start_generate(request):
            if len(attempts) == 1 and chunk.token_ids[0] == 3:
                yield GenerationChunk("", finish_reason="preempt")
            yield chunk

    async def scenario() -> None:
        hosted = Hosted(Custom(given_back), FaultyCluster())
        assert_whole(await collect(hosted.dispatcher.generate(generation())))
        assert attempts == [(), (1, 2)]
        await hosted.settle()

    run(scenario)


def test_text_without_ids_cannot_be_resumed() -> None:
    """Of engines that send no ids nobody knows where to go on: an error is better than text twice."""

    async def no_ids(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
        yield GenerationChunk("Once")
        raise EngineUnavailable("gone")

    async def scenario() -> None:
        hosted = Hosted(Custom(no_ids), FaultyCluster())
        chunks = hosted.dispatcher.generate(generation())
        assert (await anext(chunks)).text == "Once"
        with pytest.raises(EngineUnavailable):
            await anext(chunks)
        await hosted.settle()

    run(scenario)


@pytest.mark.case("PD-30")
@pytest.mark.parametrize("limit", [1, 2, 4, 7, 50])
def test_no_more_than_max_tokens(limit: int) -> None:
    """Whatever the engine does, which here knows no limit."""

    async def scenario() -> None:
        hosted = Hosted("round_robin", FaultyCluster())
        request = replace(generation(), stop=StopParams(max_tokens=limit))
        chunks = await collect(hosted.dispatcher.generate(request))
        assert ids(chunks) == IDS[:limit]
        assert chunks[-1].finish_reason == ("stop" if limit >= len(IDS) else "length")
        assert chunks[-1].completion_tokens == min(limit, len(IDS))
        await hosted.settle()

    run(scenario)


def test_without_any_engine_it_is_told_so() -> None:
    async def scenario() -> None:
        hosted = Hosted("round_robin", FaultyCluster())
        for engine in hosted.cluster.engines.values():
            engine.up = False
        with pytest.raises(NoEngine):
            await collect(hosted.dispatcher.generate(generation()))
        assert hosted.served.refreshes == 1
        await hosted.settle()

    run(scenario)


def test_the_pace_is_measured() -> None:
    async def scenario() -> None:
        hosted = Hosted("prefill_decode", FaultyCluster(Script(9, "dead")))
        assert_whole(await collect(hosted.dispatcher.generate(generation())))
        metrics = hosted.cluster.metrics
        assert (len(metrics.all.ttft), len(metrics.decode.ttft), len(metrics.prefill.ttft)) == (1, 1, 0)
        assert len(metrics.decode.itl) == 1
        await hosted.settle()

    run(scenario)


def test_states_of_a_request() -> None:
    states: list[str] = []

    async def watches(request: Request, cluster: Cluster) -> AsyncIterator[Any]:
        (record,) = hosted.dispatcher.ledger.records
        decode = cluster.decode.round_robin()
        states.append(record.state)
        received = await decode.prep_recv(request, end=19)
        states.append(record.state)
        await cluster.prefill.round_robin().remote_send(request, to=received)
        states.append(record.state)
        async for chunk in decode.start_generate(request, begin=19):
            yield chunk
            states.append(record.state)

    async def scenario() -> None:
        chunks = await collect(hosted.dispatcher.generate(generation()))
        assert_whole(chunks)
        assert states[:3] == ["waiting_for_prefill", "waiting_for_prefill", "handoff_to_decode"]
        assert set(states[3:]) == {"decoding"}
        (record,) = hosted.dispatcher.ledger.records
        assert record.state == "complete"
        (attempt,) = record.attempts
        assert attempt.why == "prefill-0 computed the prompt up to 19, decode-0 the rest"
        assert attempt.tokens_sent == 19
        assert hosted.dispatcher.ledger.totals.outcomes == {"ok": 1}
        assert not hosted.dispatcher.ledger.states
        await hosted.settle()

    hosted = Hosted(Custom(watches), FaultyCluster())
    run(scenario)


def test_settings_have_safe_defaults() -> None:
    assert DispatchSettings().hedge_after_s is None
    assert DispatchSettings().request_timeout_s is None
    assert DispatchSettings().retries.max_attempts == 3
