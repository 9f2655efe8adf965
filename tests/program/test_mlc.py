"""A router file in MLC-LLM's style on our engines: what it asks of them, and that our rules hold for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from microserving.errors import EngineUnavailable, NoEngine, Preempted, ProgramError
from microserving.program import GenerationChunk, Program, Request, SamplingParams, StopParams
from microserving.program.mlc import Router, microserving_entrypoints, openai_api_protocol
from microserving.program.mlc.router import Responses
from microserving.program.testing import FakeCluster, FakeEngine, collect, make_request
from microserving.protocol.generation import TokenLogprob
from microserving.router.program_loader import load_program

FILE = Path(__file__).parent / "data" / "mlc_router.py"


def chunks_of(
    program: Program, cluster: FakeCluster, request: Request | None = None
) -> list[GenerationChunk]:
    return asyncio.run(collect(program.route(request or make_request(range(20), request_id="r"), cluster)))


def calls(engine: FakeEngine) -> Iterator[tuple[str, str, int, int]]:
    return ((call.verb, call.request_id, call.begin, call.end) for call in engine.calls)


HAND_OFF = [("prep_recv", "r", 0, 19), ("start_generate", "r", 19, 20)]


def test_a_file_with_changed_imports_runs() -> None:
    loaded = load_program(str(FILE))
    assert loaded.name == "mlc_router"
    cluster = FakeCluster(prefill=1, decode=2)
    chunks = chunks_of(loaded.instance, cluster)
    assert [(c.text, c.token_ids, c.finish_reason) for c in chunks] == [
        ("Hello", (1,), None),
        (" world", (2,), "stop"),
    ]
    assert (chunks[-1].prompt_tokens, chunks[-1].completion_tokens) == (20, 2)
    assert list(calls(cluster["prefill-0"])) == [("remote_send", "r", 0, 19)]
    assert list(calls(cluster["decode-0"])) == HAND_OFF
    assert cluster["decode-1"].calls == []
    assert not [engine for engine in cluster.engines.values() if engine.held]


def test_it_shares_work_by_our_counters() -> None:
    """The file's own counting has no effect, so nothing of it can drift when requests end early."""

    async def scenario() -> None:
        program = load_program(str(FILE)).instance
        cluster = FakeCluster(prefill=1, decode=2)
        for number in range(10):  # left after the first chunk: the file never subtracts
            route = program.route(make_request(range(20), request_id=f"left-{number}"), cluster)
            await anext(route)
            await route.aclose()  # type: ignore[attr-defined]
            for engine in cluster.engines.values():
                await engine.abort(make_request([], request_id=f"left-{number}"))
        await cluster["decode-0"].prep_recv(make_request([1], request_id="other"), end=0)
        await collect(program.route(make_request(range(20), request_id="r"), cluster))
        assert list(calls(cluster["decode-1"]))[-2:] == HAND_OFF

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "prefill", "decode"),
    [
        ({}, [("remote_send", "r", 0, 19)], HAND_OFF),
        (
            {"pd_balance_factor": 0.5},
            [("remote_send", "r", 0, 10)],
            [("prep_recv", "r", 0, 10), ("start_generate", "r", 10, 20)],
        ),
        ({"router_mode": "round-robin"}, [("start_generate", "r", 0, 20)], []),
    ],
)
def test_the_modes_without_a_translation(
    settings: dict[str, object],
    prefill: list[tuple[str, str, int, int]],
    decode: list[tuple[str, str, int, int]],
) -> None:
    cluster = FakeCluster()
    assert chunks_of(Router(**settings), cluster)[-1].finish_reason == "stop"
    assert list(calls(cluster["prefill-0"])) == prefill
    assert list(calls(cluster["decode-0"])) == decode


class Fixed(Router):
    """MLC's tutorial: no look at the matched length, engine 0 prefills, engine 1 decodes; negative indices."""

    async def translate_request(
        self, request: openai_api_protocol.CompletionRequest, request_id: str
    ) -> Responses:
        fields = request.model_dump()
        prepare = microserving_entrypoints.PrepRecvRequest(**fields, end=-1)
        address, _ = await self.send_prepare_receive(None, prepare, self.server_urls[1])
        send = microserving_entrypoints.RemoteSendRequest(
            **fields, begin=0, end=-1, kv_addr_info=address, recv_rank=self.device_id_starts[1]
        )
        await self.send_remote_send(None, send, self.server_urls[0])
        begin = microserving_entrypoints.StartGenerateRequest(**fields, begin=-1)
        async for response in self.send_start_generate(None, begin, self.server_urls[1]):
            yield response


@pytest.mark.parametrize(("matched", "sent"), [(0, [(0, 19)]), (7, [(7, 19)]), (19, []), (50, [])])
def test_a_file_that_knows_no_prefix_cache_gets_its_gain(matched: int, sent: list[tuple[int, int]]) -> None:
    cluster = FakeCluster()
    cluster["decode-0"].matched = matched
    assert chunks_of(Fixed(), cluster)[-1].finish_reason == "stop"
    assert [(call.begin, call.end) for call in cluster["prefill-0"].calls] == sent


def test_prefill_engines_come_first_after_a_change_of_roles() -> None:
    cluster = FakeCluster(prefill=1, decode=1)
    cluster["prefill-0"].role, cluster["decode-0"].role = "decode", "prefill"
    chunks_of(Fixed(), cluster)
    assert list(calls(cluster["decode-0"])) == [("remote_send", "r", 0, 19)]


class Recording(FakeEngine):
    """Remembers the requests that it is asked to generate."""

    asked: list[Request]

    async def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        self.asked = [*getattr(self, "asked", []), request]
        async for chunk in super().start_generate(request, begin=begin):
            yield chunk


class Changing(Router):
    seen: int = 0

    async def translate_request(
        self, request: openai_api_protocol.CompletionRequest, request_id: str
    ) -> Responses:
        self.seen += 1  # kept for all requests
        request.max_tokens, request.temperature, request.stop = 3, 0.5, "end"
        request.user, request.stream = f"{request_id}-{self.seen}", False
        whole = microserving_entrypoints.StartGenerateRequest(**request.model_dump(), begin=0)
        async for response in self.send_start_generate(None, whole, self.server_urls[0]):
            yield response


def test_what_a_file_changes_counts_and_the_rest_stays() -> None:
    async def scenario() -> None:
        engine = Recording("e", "hybrid")
        cluster = FakeCluster(prefill=0, decode=0)
        cluster.engines["e"] = engine
        sampling = SamplingParams(temperature=1.0, top_k=5, seed=2**63 + 1, logit_bias={7: 1.5})
        request = Request("r", (1, 2), sampling, StopParams(50, ("a", "b"), (9,), True), cache_salt="s")
        program = Changing()
        for _ in range(2):
            (chunk,) = await collect(program.route(request, cluster))
            assert (chunk.text, chunk.token_ids, chunk.completion_tokens) == ("Hello world", (1, 2), 2)
        assert [asked.request_id for asked in engine.asked] == ["r-1", "r-2"]
        asked = engine.asked[0]
        assert asked.sampling == SamplingParams(temperature=0.5, top_k=5, seed=2**63 + 1, logit_bias={7: 1.5})
        assert asked.stop == StopParams(3, ("end",), (9,), True)
        assert (asked.prompt_token_ids, asked.cache_salt) == ((1, 2), "s")
        assert program.seen == 2

    asyncio.run(scenario())


class Scored(FakeEngine):
    """Tells log-probabilities of the prompt with the first token, and of each token."""

    async def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        scores: tuple[TokenLogprob | None, ...] | None = (None, TokenLogprob(7, -0.5))
        async for chunk in super().start_generate(request, begin=begin):
            own = tuple(TokenLogprob(token, -float(token), ((1, -0.1),), 2) for token in chunk.token_ids)
            yield replace(chunk, logprobs=own, prompt_logprobs=scores)
            scores = None


@pytest.mark.parametrize("make", [Changing, lambda: Router(router_mode="round-robin")])
def test_log_probabilities_pass(make: Callable[[], Router]) -> None:
    async def scenario() -> None:
        engine, cluster = Scored("e", "hybrid"), FakeCluster(prefill=0, decode=0)
        cluster.engines["e"] = engine
        wanted = await collect(engine.start_generate(make_request([1, 2])))
        chunks = await collect(make().route(make_request([1, 2]), cluster))
        for name in ("logprobs", "token_ids"):
            assert [each for chunk in chunks for each in getattr(chunk, name)] == [
                each for chunk in wanted for each in getattr(chunk, name)
            ]
        assert chunks[0].prompt_logprobs == wanted[0].prompt_logprobs
        assert [chunk.prompt_logprobs for chunk in chunks[1:]] == [None] * (len(chunks) - 1)

    asyncio.run(scenario())


def test_none_is_a_typed_error_for_the_host() -> None:
    class GivesUp(Router):
        async def translate_request(
            self,
            request: openai_api_protocol.CompletionRequest,
            request_id: str,
        ) -> Responses:
            yield None

    with pytest.raises(Preempted):
        chunks_of(GivesUp(), FakeCluster())


def test_engines_that_are_missing_or_fail() -> None:
    with pytest.raises(NoEngine, match="not all engines are reachable"):
        chunks_of(Fixed(), FakeCluster(prefill=1, decode=0))
    with pytest.raises(NoEngine):
        chunks_of(Router(), FakeCluster(prefill=1, decode=0))
    with pytest.raises(NoEngine):
        chunks_of(Router(router_mode="round-robin"), FakeCluster(prefill=0, decode=0))
    cluster = FakeCluster()
    cluster["prefill-0"].failures["remote_send"] = EngineUnavailable("gone")
    with pytest.raises(EngineUnavailable, match="gone"):
        chunks_of(load_program(str(FILE)).instance, cluster)


def test_two_requests_at_once_do_not_mix() -> None:
    async def scenario() -> None:
        program, cluster = Fixed(), FakeCluster()
        requests = [make_request(range(10 + i), request_id=f"r{i}") for i in range(8)]
        answers = await asyncio.gather(*(collect(program.route(request, cluster)) for request in requests))
        assert [answer[-1].prompt_tokens for answer in answers] == list(range(10, 18))
        assert not [engine for engine in cluster.engines.values() if engine.held]

    asyncio.run(scenario())


def test_mistakes_are_told(tmp_path: Path) -> None:
    """With file and line when the file is loaded; in words when it runs."""
    file = tmp_path / "skeleton.py"
    file.write_text(
        "from microserving.program.mlc import Router\n"
        "class Custom(Router):\n"
        "    async def translate_request(self, request, request_id):\n"
        "        pass\n"
    )
    with pytest.raises(ProgramError, match=r"skeleton.py:2: .*translate_request must be an async generator"):
        load_program(str(file))
    with pytest.raises(ProgramError, match="setting 'router_mode' is wrong"):
        Router(router_mode="fast")
    with pytest.raises(RuntimeError, match="within translate_request only"):
        _ = Router().server_urls
    file.write_text(
        "from microserving.program.mlc import Router, aiohttp\n"
        "class Custom(Router):\n"
        "    async def translate_request(self, request, request_id):\n"
        "        async with aiohttp.ClientSession() as session:\n"
        "            session.post(self.server_urls[0] + '/v1/completions', json={})\n"
        "        yield None\n"
    )
    with pytest.raises(NotImplementedError, match="no connections of its own"):
        chunks_of(load_program(str(file)).instance, FakeCluster())
