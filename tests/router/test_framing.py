"""The router makes the framing of every message itself: on real sockets, before it and behind it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from microserving.front import bind_listener
from microserving.front.serving import serving_beside
from tests.front.framing import AMBIGUOUS, CLEAR, SMUGGLED, answers, exchange, statuses

from .engine_server import STREAM, whole
from .test_app import Setup, with_router

PROMPT = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 9}
ERROR = {"error": {"message": "no" * 400, "type": "t", "param": "top_k", "code": None}}
NOT_OURS = {
    "x-engine": "internal",
    "connection": "x-engine",
    "keep-alive": "timeout=1",
    "server": "engine",
    "content-encoding": "identity",
    "trailer": "x-engine",
}
"""Headers of an engine that are between it and the router."""


def on_a_socket(scenario: Callable[[Setup, int], Awaitable[None]]) -> None:
    """The router behind a real port, as its process serves it."""

    async def listening(setup: Setup) -> None:
        with bind_listener("127.0.0.1", 0) as listener:
            async with serving_beside(setup.router.app, listener):
                await scenario(setup, listener.getsockname()[1])

    with_router(listening, max_attempts=1)


def asking(**fields: Any) -> bytes:
    body = json.dumps(PROMPT | fields).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n" % len(body)
    return head + b"connection: close\r\n\r\n" + body


async def ask(port: int, **fields: Any) -> tuple[int, dict[str, str], bytes]:
    received = await asyncio.to_thread(exchange, port, asking(**fields))
    (answer,) = answers(received)  # one, whose own framing takes all that came
    return answer


@pytest.mark.case("RT-16")
@pytest.mark.case("SC-26")
def test_what_can_be_read_in_two_ways_reaches_no_engine() -> None:
    async def scenario(setup: Setup, port: int) -> None:
        for kind, request in AMBIGUOUS.items():
            received = await asyncio.to_thread(exchange, port, request + SMUGGLED)
            assert statuses(received) == [400], kind
        assert setup.prefill.verbs == setup.decode.verbs == []

    on_a_socket(scenario)


@pytest.mark.case("RT-16")
def test_what_is_odd_but_clear_is_sent_on_with_a_length_of_our_own() -> None:
    async def scenario(setup: Setup, port: int) -> None:
        for kind, request in CLEAR.items():
            received = await asyncio.to_thread(exchange, port, request + SMUGGLED)
            assert statuses(received) == [200, 200], kind
        assert setup.decode.verbs == ["prep_recv", "start_generate"] * len(CLEAR)
        for heads in (setup.prefill.heads, setup.decode.heads):
            names = {name for path, head in heads if "/microserving/" in path for name in head}
            assert names <= {"host", "accept-encoding", "content-type", "content-length"}

    on_a_socket(scenario)


@pytest.mark.case("RT-16")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_an_error_of_an_engine_is_framed_anew(stream: bool, zipped: bool) -> None:
    """What comes zipped is not read: we ask for no coding, so that engine is broken."""

    async def scenario(setup: Setup, port: int) -> None:
        body: Any = gzip.compress(json.dumps(ERROR).encode()) if zipped else ERROR
        headers = NOT_OURS | ({"content-encoding": "gzip"} if zipped else {})
        setup.decode.answers["start_generate"] = (400, body, headers)
        status, head, answer = await ask(port, stream=stream)
        error = json.loads(answer)["error"]
        if zipped:
            assert (status, error["code"]) == (502, "engine_unavailable")
        else:
            assert (status, error["message"]) == (400, ERROR["error"]["message"])
        assert int(head["content-length"]) == len(answer)
        check_ours(head)

    on_a_socket(scenario)


@pytest.mark.case("RT-16")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_an_answer_of_an_engine_is_framed_anew(stream: bool, zipped: bool) -> None:
    async def scenario(setup: Setup, port: int) -> None:
        body = b"".join(STREAM) if stream else json.dumps(whole(STREAM)).encode()
        headers = dict(NOT_OURS)
        if zipped:
            body, headers = gzip.compress(body), headers | {"content-encoding": "gzip"}
        setup.decode.answers["start_generate"] = (200, body, headers)
        status, head, answer = await ask(port, stream=stream)
        check_ours(head)
        if zipped:
            assert (status, json.loads(answer)["error"]["code"]) == (502, "engine_unavailable")
        elif stream:
            assert (status, answer.endswith(b"data: [DONE]\n\n")) == (200, True)
            assert head["transfer-encoding"] == "chunked"
        else:
            assert (status, json.loads(answer)["choices"][0]["text"]) == (200, "Hello")
            assert int(head["content-length"]) == len(answer)

    on_a_socket(scenario)


def check_ours(head: dict[str, str]) -> None:
    """Nothing of the engine's head is there."""
    assert head["connection"] == "close"
    assert not head.keys() & (NOT_OURS.keys() - {"connection", "server"})
    assert head.get("server") != "engine"
