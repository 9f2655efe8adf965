"""The programs that users copy: what they call, and that nothing is left whenever a request ends.

What fails at which of their awaits is tried by the kit (``tests/testing``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import pytest

from microserving.errors import (
    EngineUnavailable,
    InvalidRequest,
    KVExhausted,
    MicroservingError,
    NoEngine,
    TransferFailed,
)
from microserving.program.testing import Call, FakeCluster, collect

from .hosting import Hosted, generation

MLC_FILE = str(Path(__file__).parents[1] / "program" / "data" / "mlc_router.py")
PROGRAMS: dict[str, tuple[str, dict[str, object]]] = {
    "round_robin": ("round_robin", {}),
    "prefill_decode": ("prefill_decode", {}),
    "balanced_prefill_decode": ("balanced_prefill_decode", {}),
    "balanced, auto": ("balanced_prefill_decode", {"pd_balance_factor": "auto"}),
    "prefix_aware": ("prefix_aware", {}),
    "prefix_aware, exact": ("prefix_aware", {"exact": True}),
    "context_migration": ("context_migration", {}),
    "context_migration, always": ("context_migration", {"min_tokens": 1, "slack": -9}),
    "adaptive": ("adaptive", {}),
    "adaptive, apart": ("adaptive", {"apart": True}),
    "mlc": (MLC_FILE, {}),
}
WHOLE = {"round_robin", "prefix_aware", "prefix_aware, exact", "context_migration", "adaptive"}
"""Programs that hand nothing over here."""
VERBS = ["prep_recv", "remote_send", "start_generate", "match_prefix", "commit"]


def hosted_program(name: str, cluster: FakeCluster | None = None) -> Hosted:
    """For migration a context that is on the engine which is not the next one's turn."""
    program, settings = PROGRAMS[name]
    hosted = Hosted(program, cluster, **settings)
    if name == "context_migration, always":
        hosted.cluster["decode-0"].matched = 10
    return hosted


def test_round_robin_takes_turns() -> None:
    async def scenario() -> None:
        hosted = Hosted("round_robin", FakeCluster(prefill=1, decode=2))
        for number in range(6):
            await collect(hosted.dispatcher.generate(generation(request_id=f"r{number}")))
        counts = {engine_id: len(engine.calls) for engine_id, engine in hosted.cluster.engines.items()}
        assert counts == {"prefill-0": 2, "decode-0": 2, "decode-1": 2}
        assert hosted.cluster["decode-0"].calls == [
            Call("start_generate", "r1", 0, 20),
            Call("start_generate", "r4", 0, 20),
        ]
        await hosted.settle()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("program", "settings", "end"),
    [
        ("prefill_decode", {}, 19),
        ("balanced_prefill_decode", {"pd_balance_factor": 0.0}, 19),
        ("balanced_prefill_decode", {}, 18),
        ("balanced_prefill_decode", {"pd_balance_factor": 0.5}, 10),
    ],
)
def test_the_prompt_is_split(program: str, settings: dict[str, object], end: int) -> None:
    async def scenario() -> None:
        hosted = Hosted(program, **settings)
        chunks = await collect(hosted.dispatcher.generate(generation(20)))
        assert "".join(chunk.text for chunk in chunks) == "Hello world"
        assert hosted.cluster["decode-0"].calls == [
            Call("prep_recv", "r", 0, end),
            Call("start_generate", "r", end, 20),
        ]
        assert hosted.cluster["prefill-0"].calls == [Call("remote_send", "r", 0, end)]
        await hosted.settle()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("program", "settings", "length", "matched"),
    [
        pytest.param("balanced_prefill_decode", {"pd_balance_factor": 1.0}, 20, 0, id="factor 1"),
        pytest.param("balanced_prefill_decode", {"pd_balance_factor": 1 - 1e-9}, 20, 0, id="nearly 1"),
        pytest.param("prefill_decode", {}, 1, 0, id="one token", marks=pytest.mark.case("PD-26")),
        pytest.param("prefill_decode", {}, 20, 20, id="all matched", marks=pytest.mark.case("PD-28")),
        pytest.param(
            "balanced_prefill_decode",
            {"pd_balance_factor": 0.9},
            20,
            20,
            id="matched beyond the split",
            marks=pytest.mark.case("PD-29"),
        ),
    ],
)
def test_nothing_is_sent(program: str, settings: dict[str, object], length: int, matched: int) -> None:
    async def scenario() -> None:
        hosted = Hosted(program, **settings)
        hosted.cluster["decode-0"].matched = matched
        chunks = await collect(hosted.dispatcher.generate(generation(length)))
        assert chunks[-1].finish_reason == "stop"
        assert hosted.cluster["prefill-0"].calls == []
        await hosted.settle()

    asyncio.run(scenario())


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.case("PD-01")
def test_cancelled_at_every_await(program: str) -> None:
    """The client leaves after any number of steps: everything is freed, and the counters are zero."""

    async def cancelled_after(steps: int) -> bool:
        hosted = hosted_program(program)
        task = asyncio.ensure_future(collect(hosted.dispatcher.generate(generation())))
        for _ in range(steps):
            await asyncio.sleep(0)
        done = task.done()
        task.cancel()
        await asyncio.wait([task])
        await hosted.settle()
        return done

    async def scenario() -> None:
        steps = 0
        while not await cancelled_after(steps):
            steps += 1
        assert steps >= (4 if program in WHOLE else 8)

    asyncio.run(scenario())


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("error", [EngineUnavailable, TransferFailed, KVExhausted, InvalidRequest])
@pytest.mark.case("PD-05")
def test_every_failure_frees_everything(program: str, verb: str, error: type[MicroservingError]) -> None:
    """The error reaches the front as it is, unless the program can do without; what was reserved before is aborted."""

    async def scenario() -> None:
        hosted = hosted_program(program)
        for engine in hosted.cluster.engines.values():
            engine.failures[verb] = error("told to fail")
        caught: MicroservingError | None = None
        try:
            await collect(hosted.dispatcher.generate(generation()))
        except MicroservingError as raised:
            caught = raised
        if caught is not None:
            assert (type(caught), caught.message) == (error, "told to fail")
        else:
            assert verb not in needed
        await hosted.settle()

    # Migration is tried again on the engines that did not fail, where there is nothing to move then.
    whole = program in WHOLE or program == "context_migration, always"
    needed = {"start_generate"} if whole else {"prep_recv", "remote_send", "start_generate"}
    asyncio.run(scenario())


@pytest.mark.parametrize("program", PROGRAMS.keys() - {"mlc", "context_migration, always"})
@pytest.mark.case("RT-04")
def test_a_storm_of_early_ends_leaves_an_even_split(program: str) -> None:
    """300 requests, each cancelled after another number of steps, then 40 whole ones: shared evenly."""

    async def scenario() -> None:
        hosted = hosted_program(program, FakeCluster(prefill=2, decode=2))

        async def one(number: int) -> None:
            task = asyncio.ensure_future(
                collect(hosted.dispatcher.generate(generation(request_id=f"r{number}")))
            )
            for _ in range(number % 13):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

        await asyncio.gather(*map(one, range(300)))
        await hosted.settle()
        for engine in hosted.cluster.engines.values():
            engine.calls.clear()
        for number in range(40):
            await collect(hosted.dispatcher.generate(generation(request_id=f"s{number}")))
        decodes = Counter(engine_id for engine_id, verb in hosted.cluster.calls if verb == "start_generate")
        share = 10 if program in WHOLE else 20
        assert set(decodes.values()) == {share}
        await hosted.settle()

    asyncio.run(scenario())


def test_an_engine_that_was_chosen_for_nothing_does_not_count() -> None:
    """Most is cached, so the prefill engine is left out, and is as idle as before while the answer is streamed."""

    async def scenario() -> None:
        hosted = hosted_program("balanced, auto")
        hosted.cluster["decode-0"].matched = 19
        async with aclosing(hosted.dispatcher.generate(generation())) as chunks:
            await anext(chunks)
            assert {engine.id for engine in hosted.in_flight} == {"decode-0"}
        await hosted.settle()

    asyncio.run(scenario())


@pytest.mark.parametrize("program", ["prefill_decode", "balanced_prefill_decode"])
def test_a_missing_role_is_looked_for_once(program: str) -> None:
    async def scenario() -> None:
        hosted = Hosted(program)
        hosted.cluster["prefill-0"].up = False
        with pytest.raises(NoEngine, match="no prefill engine is reachable"):
            await collect(hosted.dispatcher.generate(generation()))
        assert hosted.served.refreshes == 1
        hosted.served.returning = ["prefill-0"]
        chunks = await collect(hosted.dispatcher.generate(generation()))
        assert chunks[-1].finish_reason == "stop"
        assert hosted.served.refreshes == 2
        await hosted.settle()

    asyncio.run(scenario())
