"""The engine client against a real HTTP server: what it sends, and what every failure becomes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from microserving.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    KVExhausted,
    MicroservingError,
    Overloaded,
    TransferFailed,
)
from microserving.program import EngineLoad, GenerationChunk, Received, Request, SamplingParams, StopParams
from microserving.program.testing import collect, make_request
from microserving.protocol.microserving import EngineCounters, EngineInfo, TokenizerDocument
from microserving.router.engine_client import EngineTimeouts, HttpEngineClient
from microserving.router.in_flight import InFlight
from microserving.tokenizer import Tokenizer

from .engine_server import DONE, INFO, STREAM, USAGE, EngineServer, choice, event, tokenizer_document

REQUEST = make_request([5, 6, 7, 8], request_id="r")


class Client(HttpEngineClient):
    """With short timeouts, and the reasons for which the engine was reported."""

    def __init__(self, url: str, **timeouts: float) -> None:
        self.reports: list[str] = []
        super().__init__(
            url,
            "decode",
            timeouts=EngineTimeouts(**timeouts),
            in_flight=InFlight(),
            on_unreachable=lambda _, reason: self.reports.append(reason),
        )


def with_engine(
    scenario: Callable[[EngineServer, Client], Awaitable[None]], *, identified: bool = True, **timeouts: float
) -> None:
    async def run() -> None:
        async with EngineServer() as engine:
            client = Client(engine.url, **timeouts)
            if identified:
                client.identify(EngineInfo(**INFO))
            try:
                await scenario(engine, client)
            finally:
                await client.close()

    asyncio.run(run())


def test_what_the_verbs_send() -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        request = Request(
            "r",
            (5, 6, 7, 8),
            SamplingParams(temperature=0.5, logit_bias={3: -1.5}, seed=2**63),
            StopParams(max_tokens=9, stop=("x",)),
        )
        received = await client.prep_recv(request, end=-1)
        assert received == Received("META", 0, 3, client, 0, 30.0)
        result = await client.remote_send(request, to=received)
        assert (result.tokens_computed, result.bytes_sent, result.prefill_ms) == (3, 192, 1.5)
        await collect(client.start_generate(request, begin=3))
        assert await client.match_prefix(request) == 2
        await client.abort(request)

        assert engine.verbs == ["prep_recv", "remote_send", "start_generate", "match_prefix", "abort"]
        prep_recv, remote_send, start_generate = (body for _, body in engine.bodies[:3])
        common = {"model": "tiny", "prompt": [5, 6, 7, 8], "request_id": "r", "max_tokens": 9, "seed": 2**63}
        common |= {"temperature": 0.5, "logit_bias": {"3": -1.5}, "stop": ["x"]}
        for body in (prep_recv, remote_send, start_generate):
            assert {key: body[key] for key in common} == common
        assert prep_recv["end"] == -1
        window = {key: remote_send[key] for key in ("begin", "end", "kv_addr_info", "recv_rank")}
        assert window == {"begin": 0, "end": 3, "kv_addr_info": "META", "recv_rank": 0}
        assert start_generate["begin"] == 3
        assert start_generate["stream"] is True
        assert engine.bodies[4][1] == {"request_id": "r"}
        assert len(engine.connections) == 1  # kept alive, also after a stream

    with_engine(scenario)


def test_what_was_matched_is_not_asked_for() -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        result = await client.remote_send(REQUEST, to=Received("META", 3, 3, client))
        assert (result.tokens_sent, engine.requests) == (0, [])

    with_engine(scenario)


@pytest.mark.case("PD-38")
def test_the_stream_as_chunks() -> None:
    """Totals are the engine's, also when a chunk shows no token ids."""

    async def scenario(engine: EngineServer, client: Client) -> None:
        chunks = await collect(client.start_generate(REQUEST))
        shown = [(c.text, c.token_ids, c.finish_reason, c.completion_tokens) for c in chunks]
        assert shown == [("Hel", (1,), None, 1), ("lo", (2,), "stop", 2)]
        assert chunks[-1].prompt_tokens == 4

    with_engine(scenario)


def test_a_stream_split_anywhere() -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        whole = b"".join([choice("é", [1]), choice("ß", [2], "length"), USAGE, DONE])
        engine.stream = [whole[i : i + 1] for i in range(len(whole))]
        chunks = await collect(client.start_generate(REQUEST))
        assert [(c.text, c.finish_reason) for c in chunks] == [("é", None), ("ß", "length")]

    with_engine(scenario)


async def call(client: Client, verb: str) -> None:
    if verb == "prep_recv":
        await client.prep_recv(REQUEST, end=3)
    elif verb == "remote_send":
        await client.remote_send(REQUEST, to=Received("META", 0, 3, client))
    elif verb == "match_prefix":
        await client.match_prefix(REQUEST)
    else:
        await collect(client.start_generate(REQUEST))


async def read_into(seen: list[str], chunks: AsyncIterator[GenerationChunk]) -> None:
    async for chunk in chunks:
        seen.append(chunk.text)


def error(message: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "t", "param": param, "code": code}}


@pytest.mark.parametrize("verb", ["prep_recv", "start_generate"])
@pytest.mark.parametrize(
    ("status", "body", "leaf", "message"),
    [
        (400, error("end is 9", "invalid_value", "end"), InvalidRequest, "end is 9"),
        (400, error("too long", "context_length_exceeded"), ContextLengthExceeded, "too long"),
        (400, error("odd", "from_the_future"), InvalidRequest, "odd"),
        (401, error("no key", "invalid_api_key"), EngineUnavailable, "engine decode-0: no key"),
        (404, error("no such model", "model_not_found"), EngineUnavailable, "engine decode-0: no such model"),
        (409, error("in use", "request_id_in_use"), EngineUnavailable, "engine decode-0: in use"),
        (409, error("no lease", "lease_invalid"), TransferFailed, "engine decode-0: no lease"),
        (429, error("slow down", "rate_limit_exceeded"), Overloaded, "engine decode-0: slow down"),
        (500, error("oops", "internal_error"), EngineUnavailable, "engine decode-0: oops"),
        (502, error("lost", "transfer_failed"), TransferFailed, "lost"),
        (503, error("full", "kv_exhausted"), KVExhausted, "full"),
        (503, error("odd", None), EngineUnavailable, "odd"),
        (500, b"Internal Server Error", EngineUnavailable, "engine decode-0 answered with status 500"),
        (404, {"detail": "Not Found"}, EngineUnavailable, "engine decode-0 answered with status 404"),
        (302, b"", EngineUnavailable, "engine decode-0 answered with status 302"),
        (503, {"error": "text"}, EngineUnavailable, "engine decode-0 answered with status 503"),
    ],
)
def test_error_answers(
    verb: str, status: int, body: Any, leaf: type[MicroservingError], message: str
) -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        engine.answers[verb] = (status, body, {"retry-after": "7"})
        with pytest.raises(leaf) as caught:
            await call(client, verb)
        assert type(caught.value) is leaf
        assert caught.value.message == message
        if isinstance(caught.value, Overloaded):
            assert caught.value.retry_after_s == 7
        if leaf is InvalidRequest:
            assert caught.value.param == (body["error"]["param"])
        assert client.reports == []  # it answered: it is up
        await client.abort(REQUEST)
        assert len(engine.connections) == 1

    with_engine(scenario)


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("prep_recv", b"not json"),
        ("prep_recv", []),
        ("prep_recv", {}),
        ("prep_recv", {"kv_append_metadata": 3, "prefix_matched_length": 0}),
        ("prep_recv", {"kv_append_metadata": "m", "prefix_matched_length": -1}),
        ("prep_recv", {"kv_append_metadata": "m", "prefix_matched_length": 4}),  # more than asked for
        ("match_prefix", {"prefix_matched_length": "2"}),
    ],
)
def test_wrong_answers(verb: str, body: Any) -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        engine.answers[verb] = (200, body, {})
        with pytest.raises(EngineUnavailable, match=r"^engine decode-0 (gave|answered|matched)"):
            await call(client, verb)

    with_engine(scenario)


@pytest.mark.parametrize(
    ("stream", "texts", "leaf", "message"),
    [
        (STREAM[:1], ["Hel"], EngineUnavailable, "ended the stream early"),
        (STREAM[:2], ["Hel"], EngineUnavailable, "ended the stream early"),
        (STREAM[:3], ["Hel", "lo"], EngineUnavailable, "ended the stream early"),
        ([], [], EngineUnavailable, "ended the stream early"),
        ([STREAM[0], RuntimeError("dies")], ["Hel"], EngineUnavailable, "broke the connection"),
        ([STREAM[0], event(error("full", "kv_exhausted"))], ["Hel"], KVExhausted, "full"),
        ([STREAM[0], event(error("bug", "internal_error"))], ["Hel"], EngineUnavailable, "decode-0: bug"),
        ([event("{nonsense")], [], EngineUnavailable, "not a JSON object"),
        ([event({"choices": [{"text": 3}]})], [], EngineUnavailable, "wrong chunk"),
    ],
)
@pytest.mark.case("STR-05")
def test_streams_that_break(
    stream: list[Any], texts: list[str], leaf: type[MicroservingError], message: str
) -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        engine.stream = stream
        seen: list[str] = []
        with pytest.raises(leaf, match=message):
            await read_into(seen, client.start_generate(REQUEST))
        assert seen == texts

    with_engine(scenario)


def test_an_engine_that_dies_within_a_stream_is_reported_at_once() -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        engine.stream = [STREAM[0], asyncio.Event()]
        chunks = client.start_generate(REQUEST)
        assert (await anext(chunks)).text == "Hel"
        killing = asyncio.create_task(engine.kill())
        with pytest.raises(EngineUnavailable, match="engine decode-0 broke the connection"):
            async with asyncio.timeout(2):
                await anext(chunks)
        assert client.reports[0].startswith("the connection broke")
        await killing
        with pytest.raises(EngineUnavailable, match="engine decode-0 cannot be reached"):
            await client.prep_recv(REQUEST, end=1)
        assert client.reports[-1].startswith("cannot connect")

    with_engine(scenario)


def test_messages_hold_no_address() -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        await engine.kill()
        with pytest.raises(EngineUnavailable) as caught:
            await client.prep_recv(REQUEST, end=1)
        assert caught.value.message == "the engine cannot be reached"

    with_engine(scenario, identified=False)


@pytest.mark.parametrize("stage", ["prep_recv", "remote_send", "start_generate", "stream"])
@pytest.mark.case("PD-40")
def test_a_frozen_engine_fails_the_stage(stage: str) -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        if stage == "stream":
            engine.stream = [STREAM[0], asyncio.Event()]
        else:
            engine.thawed.clear()
        with pytest.raises(EngineUnavailable, match="engine decode-0 does not answer"):
            await call(client, stage)
        engine.thawed.set()

    with_engine(scenario, prep_recv=0.1, stage=0.1)


def test_giving_up_fails_all_that_waits() -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        engine.stream = [STREAM[0], asyncio.Event()]
        chunks = client.start_generate(REQUEST)
        await anext(chunks)
        waiting = [
            asyncio.ensure_future(anext(chunks)),
            asyncio.ensure_future(client.prep_recv(REQUEST, end=1)),
        ]
        engine.thawed.clear()
        await engine.frozen_by.wait()
        client.give_up("is frozen")
        for task in waiting:
            with pytest.raises(EngineUnavailable, match="engine decode-0 is frozen"):
                await task
        assert not client._http._waits

    with_engine(scenario)


@pytest.mark.case("STR-01")
def test_closing_a_stream_leaves_the_engine() -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        engine.stream = [STREAM[0], asyncio.Event()]
        async with aclosing(client.start_generate(REQUEST)) as chunks:  # type: ignore[type-var]
            await anext(chunks)
        async with asyncio.timeout(2):
            await engine.stream_left.wait()
        assert client.reports == []

    with_engine(scenario)


def test_the_router_asks_for_itself() -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        assert client.id == engine.url
        assert (client.load.total_pages, client.in_flight) == (0, 0)
        client.identify(await client.probe(1.0))
        assert client.id == "decode-0"
        assert (client.load.running, client.load.free_pages, client.load.decode_step_ms) == (1, 40, 2.5)
        assert await client.fetch_tokenizer() == engine.tokenizer
        engine.ready = False
        with pytest.raises(MicroservingError, match="not yet"):
            await client.probe(1.0)

    with_engine(scenario, identified=False)


def test_totals_have_no_bound() -> None:
    """Of bytes a fast link sends any number in time."""
    assert EngineCounters(bytes_sent=2**60).bytes_sent == 2**60


@pytest.mark.parametrize(
    ("name", "value"),
    [("prefill_tokens_per_s", -1.0), ("decode_step_ms", 1e300), ("queued_prefill_tokens", 10**309), ("running", -1)],
)  # fmt: skip
def test_a_load_that_cannot_be_is_an_engine_that_answers_wrongly(name: str, value: float) -> None:
    """Policies calculate with it: there it would be the program's fault."""

    async def scenario(engine: EngineServer, client: Client) -> None:
        engine.load[name] = value
        with pytest.raises(MicroservingError, match=name):
            await client.probe(1.0)
        assert client.load == EngineLoad()

    with_engine(scenario)


@contextmanager
def full_listener() -> Iterator[str]:
    """The URL of a server that takes no more connections: the kernel lets new ones wait."""
    with socket.socket() as listener, socket.socket() as one, socket.socket() as two:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for waiting in (one, two):
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_connection_that_takes_too_long_refuses_its_request_and_reports_nobody() -> None:
    async def main() -> None:
        with full_listener() as url:
            client = Client(url, connect=0.1)
            client.identify(EngineInfo(**INFO))
            with pytest.raises(Overloaded, match="engine decode-0 took no connection in time") as caught:
                await client.prep_recv(REQUEST, end=1)
            assert caught.value.retry_after_s == 1.0
            assert type(caught.value) is Overloaded
            assert client.reports == []
            with pytest.raises(TimeoutError):
                await client.probe(0.1)
            await client.close()

    asyncio.run(main())


def test_what_needs_an_engine_ends_when_that_is_given_up() -> None:
    async def scenario(_: EngineServer, client: Client) -> None:
        async def answer() -> int:
            return 7

        async def fail() -> None:
            raise TransferFailed("lost")

        assert await client.while_answering(answer()) == 7
        with pytest.raises(TransferFailed):
            await client.while_answering(fail())
        waiting = asyncio.create_task(client.while_answering(asyncio.Event().wait()))
        await asyncio.sleep(0)
        client.give_up("does not answer")
        with pytest.raises(EngineUnavailable, match="engine decode-0 does not answer"):
            await waiting
        with pytest.raises(EngineUnavailable):  # also what comes too late
            await client.while_answering(asyncio.Event().wait())
        client.identify(EngineInfo(**INFO))
        assert await client.while_answering(answer()) == 7

    with_engine(scenario)


@pytest.mark.case("PD-09")
def test_a_storm_of_cancellations_leaves_no_connection_in_use() -> None:
    """300 calls and streams, each cancelled after another number of steps of the event loop."""

    async def scenario(engine: EngineServer, client: Client) -> None:
        engine.stream = [STREAM[0], asyncio.Event()]

        async def one(number: int) -> None:
            work = call(client, "prep_recv" if number % 2 else "start_generate")
            task = asyncio.ensure_future(work)
            for _ in range(number % 60):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

        for first in range(0, 300, 20):
            await asyncio.gather(*map(one, range(first, first + 20)))
        engine.stream = list(STREAM)
        assert len(await collect(client.start_generate(REQUEST))) == 2
        connections = client._http._connections
        assert connections.busy == 0
        assert all(connection.is_fresh() for connection in connections._idle)
        assert not client._http._waits

    with_engine(scenario)


def test_a_tokenizer_travels_as_its_wire_model_says() -> None:
    document = Tokenizer.from_dict(tokenizer_document()).to_dict()
    assert TokenizerDocument.model_validate(document).model_dump() == document


def test_renewing_a_lease() -> None:
    async def scenario(engine: EngineServer, client: Client) -> None:
        assert (await client.prep_recv(REQUEST, end=3)).lease_ttl_s == 30.0
        assert await client.renew(REQUEST) == 20.0
        assert engine.bodies[-1] == ("renew", {"request_id": "r"})
        error = {"error": {"message": "expired", "code": "lease_invalid"}}
        engine.answers["renew"] = (409, error, {})
        with pytest.raises(TransferFailed, match="expired"):
            await client.renew(REQUEST)
        for unknown in (error, b"Not Found"):
            engine.answers["renew"] = (404, unknown, {})
            assert await client.renew(REQUEST) is None

    with_engine(scenario)


def test_giving_up_twice_is_no_harm() -> None:
    """The second time the wait has expired, and its task has not run yet."""

    async def scenario(engine: EngineServer, client: Client) -> None:
        engine.thawed.clear()
        task = asyncio.ensure_future(client.prep_recv(REQUEST, end=3))
        await engine.frozen_by.wait()
        waiting = asyncio.ensure_future(client.while_answering(asyncio.sleep(60)))
        await asyncio.sleep(0)
        while not (task.done() and waiting.done()):
            client.give_up("does not answer")
            await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="does not answer"):
            await waiting
        with pytest.raises(EngineUnavailable, match="does not answer"):
            await task

    with_engine(scenario)
