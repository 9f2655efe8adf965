"""Callers of the verbs that leave, engines that break: everything is freed at both ends."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from microserving.engine.runner import RunnerChunk
from microserving.errors import EngineUnavailable
from microserving.server import node as node_module
from microserving.transports.fake import FakeNetwork, FakeTransport

from .engines import MODEL, Running, engines, make_node, prefill_and_decode


def call_and_keep(engine: Running, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request on a socket of its own, do not read the answer."""
    data = json.dumps({"model": MODEL, **body}).encode()
    client = socket.create_connection(("127.0.0.1", engine.port))
    client.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return client


@contextmanager
def held(engine: Running) -> Iterator[threading.Event]:
    """The engine's steps wait until the end of the context; yields the event that a step has begun."""
    begun, go = threading.Event(), threading.Event()

    def hold(_: Sequence[RunnerChunk]) -> None:
        begun.set()
        assert go.wait(10)

    engine.runner.before_run = hold
    try:
        yield begun
    finally:
        engine.runner.before_run = None
        go.set()


PROMPT = list(range(100))


@pytest.mark.case("PD-01")
def test_leaving_remote_send() -> None:
    with prefill_and_decode() as (prefill, decode):
        received = decode.verb("prep_recv", prompt=PROMPT, end=-1, request_id="a").json()
        body = {"prompt": PROMPT, "begin": 0, "end": 99, "kv_addr_info": received["kv_append_metadata"]}
        with held(prefill) as begun:
            client = call_and_keep(prefill, "/microserving/remote_send", {**body, "recv_rank": 0})
            assert begun.wait(5)
            prefill.wait_for(running=1)
            client.close()
            # Seen before the step goes on: else what was asked for may be done first.
            prefill.wait_for(running=0)
        prefill.wait_idle()
        # The receiver was told: what it holds can be given up at once.
        answer = decode.verb("start_generate", prompt=PROMPT, begin=-1, request_id="a")
        assert answer.status_code == 409
        decode.verb("abort", request_id="a")
        decode.wait_idle()


@pytest.mark.case("STR-01")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/microserving/start_generate", "/v1/completions"])
def test_leaving_a_generation(path: str, stream: bool) -> None:
    with prefill_and_decode() as (_, decode):
        body = {"prompt": PROMPT, "begin": 0, "max_tokens": 300, "stream": stream}
        with held(decode) as begun:
            client = call_and_keep(decode, path, body)
            assert begun.wait(5)
            decode.wait_for(running=1)
            client.close()
            decode.wait_for(running=0)
        decode.wait_idle()
        assert decode.load()["counters"]["output_tokens"] <= 1


def test_leaving_while_waiting_for_pages() -> None:
    with prefill_and_decode(reserve_wait_s=30) as (_, decode):
        assert decode.verb("prep_recv", prompt=[1] * 700, end=-1, request_id="big").status_code == 200
        client = call_and_keep(decode, "/microserving/prep_recv", {"prompt": [2] * 200, "end": 200})
        decode.wait_for(waiting=1)
        client.close()
        decode.wait_for(waiting=0)
        decode.verb("abort", request_id="big")
        decode.wait_idle()


def test_no_pages_is_a_503_that_says_when_to_come_back() -> None:
    with prefill_and_decode(reserve_wait_s=0.02) as (_, decode):
        decode.verb("prep_recv", prompt=[1] * 700, end=-1, request_id="big")
        response = decode.verb("prep_recv", prompt=[2] * 200, end=200)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "kv_exhausted"
        assert int(response.headers["retry-after"]) >= 1
        decode.verb("abort", request_id="big")
        decode.wait_idle()


def test_a_reservation_expires() -> None:
    with prefill_and_decode(lease_ttl_s=0.05) as (_, decode):
        decode.verb("prep_recv", prompt=PROMPT, end=-1, request_id="x")
        decode.wait_idle()


def refuse(network: FakeNetwork) -> None:
    network.refuse_begin = True


def lose(network: FakeNetwork) -> None:
    network.fail_finish = True


@pytest.mark.parametrize(("fault", "status"), [(refuse, 409), (lose, 502)])
def test_a_transfer_that_fails_is_not_a_200(fault: Callable[[FakeNetwork], None], status: int) -> None:
    network = FakeNetwork()
    with prefill_and_decode(network) as (prefill, decode):
        received = decode.verb("prep_recv", prompt=PROMPT, end=-1, request_id="f").json()
        fault(network)
        fields = {"prompt": PROMPT, "begin": 0, "end": 99, "kv_addr_info": received["kv_append_metadata"]}
        response = prefill.verb("remote_send", recv_rank=0, **fields)
        assert response.status_code == status, response.text
        prefill.wait_idle()


@pytest.mark.case("PD-03")
def test_a_process_that_stops_keeps_its_links_while_a_put_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed link tells the receiver that its pages are free."""
    monkeypatch.setattr(node_module, "STOP_S", 0.01)
    network = FakeNetwork()
    prefill, decode = (make_node(name, FakeTransport(network=network)) for name in ("p", "d"))
    closed: list[bool] = []
    close = FakeTransport.close

    async def main() -> None:
        begun, go = threading.Event(), threading.Event()

        def hold(_: Sequence[RunnerChunk]) -> None:
            begun.set()
            assert go.wait(10)

        prefill[1].before_run = hold
        for node, _ in (prefill, decode):
            await node.start()
        services = decode[0].services
        reservation = await services.engine.prep_recv("r", PROMPT, 99)
        descriptor = services.receiver.descriptor(reservation)
        sending = asyncio.create_task(prefill[0].services.sender.send(PROMPT, 0, 99, descriptor, 0, "r"))
        assert await asyncio.to_thread(begun.wait, 5)
        stopping = asyncio.create_task(prefill[0].stop())
        await asyncio.wait([stopping], timeout=0.2)
        assert not closed
        assert services.engine.load().reserved_pages == 7
        go.set()
        await stopping
        assert closed
        with pytest.raises((asyncio.CancelledError, EngineUnavailable)):
            await sending
        assert services.engine.load().reserved_pages == 0
        await decode[0].stop()

    monkeypatch.setattr(FakeTransport, "close", lambda self: (closed.append(True), close(self)))
    asyncio.run(main())


@pytest.mark.case("STR-05")
def test_a_broken_step_ends_a_stream_with_an_error_event() -> None:
    with prefill_and_decode() as (_, decode):
        steps = 0

        def fail_later(_: Sequence[RunnerChunk]) -> None:
            nonlocal steps
            steps += 1
            if steps == 7:
                raise RuntimeError("a kernel broke")

        decode.runner.before_run = fail_later
        body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 50, "stream": True}
        text = decode.post("/v1/completions", body).text
        assert text.count('"error"') == 1
        assert "[DONE]" not in text
        assert "kernel" not in text
        assert decode.post("/v1/completions", {**body, "stream": False}).status_code == 200
        decode.wait_idle()


@pytest.mark.case("SC-12")
def test_a_huge_head_is_refused() -> None:
    with engines(make_node("e", FakeTransport())) as (engine,):
        with socket.create_connection(("127.0.0.1", engine.port)) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nx: ")
            with pytest.raises(OSError):  # noqa: PT012 - which of the sends fails is the kernel's business
                for _ in range(10_000):
                    client.sendall(b"y" * 10_000)
        assert engine.http.get("/health").status_code == 200
        # Many requests on one connection do not add up.
        for _ in range(20):
            assert engine.http.get("/health", headers={"x": "y" * 5000}).status_code == 200
        # A body is not a head, whatever the size of the reads that bring it.
        for _ in range(3):
            body = {"model": MODEL, "prompt": [1], "max_tokens": 1, "padding": "z" * 900_000}
            assert engine.post("/v1/completions", body).status_code == 200


def test_eight_clients_with_one_request_id_header() -> None:
    """PD-15: the header is echoed and means nothing."""
    with engines(make_node("e", FakeTransport())) as (engine,):
        clients = []
        for i in range(8):
            data = json.dumps({"prompt": [i + 1] * 20, "user": "same", "max_tokens": 5}).encode()
            client = socket.create_connection(("127.0.0.1", engine.port))
            fields = f"host: x\r\nx-request-id: same\r\ncontent-length: {len(data)}\r\n"
            head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n"
            client.sendall(head.encode() + data)
            clients.append(client)
        for client in clients:
            answer = client.recv(100_000)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"x-request-id: same" in answer
            client.close()
        engine.wait_idle()
