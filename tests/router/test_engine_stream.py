"""An engine's output that is read more slowly than it comes: the connection is read no further, and nothing is lost.

On a connection without a socket, in virtual time; at the end on a real one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.errors import EngineUnavailable
from microserving.program import GenerationChunk
from microserving.program.testing import make_request
from microserving.router.connection import HIGH_WATER_BYTES, Connection
from microserving.router.connections import Connections
from microserving.router.engine_client import EngineTimeouts, HttpEngineClient
from microserving.router.in_flight import InFlight

from .engine_server import DONE, USAGE, choice
from .virtual_time import run_virtual

REQUEST = make_request([1, 2, 3, 4])
SILENCE_S = 10.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
PIECE_BYTES = 1024


def in_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(number: int, *, last: bool = False, size: int = PIECE_BYTES) -> bytes:
    """The event of one token, ``size`` bytes long."""
    finish = "stop" if last else None
    return choice("x" * (size - len(choice("", [number], finish))), [number], finish)


def ids(chunks: list[GenerationChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def take_all(stream: AsyncIterator[GenerationChunk], into: list[GenerationChunk]) -> None:
    async for chunk in stream:
        into.append(chunk)


class Wire(asyncio.Transport):
    """A connection whose other end is the test: what it sends arrives as long as the router reads. pauses: how often the
    router stopped reading; arrived: bytes; asked: told of every request."""

    def __init__(self, connection: Connection, asked: asyncio.Queue[Wire]) -> None:
        super().__init__()
        self.paused = self.aborted = False
        self.pauses = self.requests = self.arrived = 0
        self._connection = connection
        self._asked = asked
        self._on_the_way: deque[bytes] = deque()

    def send(self, data: bytes) -> None:
        self._on_the_way.append(data)
        self._deliver()

    def _deliver(self) -> None:
        while self._on_the_way and not self.paused and not self.aborted:
            data = self._on_the_way.popleft()
            self.arrived += len(data)
            self._connection.data_received(data)

    def write(self, _: object) -> None:
        self.requests += 1
        self._asked.put_nowait(self)

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True
        self.pauses += 1

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False
        asyncio.get_running_loop().call_soon(self._deliver)

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            asyncio.get_running_loop().call_soon(self._connection.connection_lost, None)


@dataclass
class Opened:
    """A client whose connections are ``wires``. asked: those on which a request came."""

    client: HttpEngineClient
    wires: list[Wire] = field(default_factory=list)
    asked: asyncio.Queue[Wire] = field(default_factory=asyncio.Queue)

    async def begun(self) -> tuple[AsyncIterator[GenerationChunk], Wire]:
        """A stream of which the first event was taken."""
        stream = self.client.start_generate(REQUEST)
        taking = asyncio.ensure_future(anext(stream))
        wire = await self.asked.get()
        wire.arrived = 0
        wire.send(HEAD + in_chunk(token(0)))
        assert (await taking).token_ids == (0,)
        return stream, wire


def client_of(url: str) -> HttpEngineClient:
    return HttpEngineClient(
        url,
        "decode",
        timeouts=EngineTimeouts(stage=SILENCE_S),
        in_flight=InFlight(),
        on_unreachable=lambda _client, _reason: None,
    )


def run(scenario: Callable[[Opened], Awaitable[None]]) -> None:
    async def main() -> None:
        client = client_of("http://engine:1")
        opened = Opened(client)

        async def connect(_connections: Connections, _timeout_s: float) -> Connection:
            connection = Connection(asyncio.get_running_loop())
            opened.wires.append(Wire(connection, opened.asked))
            connection.connection_made(opened.wires[-1])
            return connection

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Connections, "_connect", connect)
            await scenario(opened)
            assert client._http._connections.busy == 0
            await client.close()

    run_virtual(main())


def test_what_nobody_takes_is_read_up_to_a_limit() -> None:
    async def scenario(opened: Opened) -> None:
        stream, wire = await opened.begun()
        for number in range(1, 1000):
            wire.send(in_chunk(token(number)))
        assert wire.paused
        assert abs(wire.arrived - HIGH_WATER_BYTES) < HIGH_WATER_BYTES / 10
        held = wire.arrived
        for number in range(1, 20):  # a part of it is taken: there is enough for a while
            assert (await anext(stream)).token_ids == (number,)
        assert (wire.paused, wire.arrived) == (True, held)
        wire.send(in_chunk(token(1000, last=True) + USAGE + DONE) + LAST)
        assert ids([chunk async for chunk in stream]) == list(range(20, 1001))
        assert wire.pauses == 1000 * PIECE_BYTES // HIGH_WATER_BYTES
        assert not wire.paused

    run(scenario)


def test_whoever_keeps_up_is_never_held_back() -> None:
    async def scenario(opened: Opened) -> None:
        stream, wire = await opened.begun()
        for number in range(1, 1000):
            taking = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            wire.send(in_chunk(token(number)))
            assert (await taking).token_ids == (number,)
        wire.send(in_chunk(token(1000, last=True, size=2 * HIGH_WATER_BYTES) + USAGE + DONE) + LAST)
        assert ids([chunk async for chunk in stream]) == [1000]
        assert wire.pauses == 0

    run(scenario)


def test_whoever_finds_something_each_time_is_never_held_back() -> None:
    async def scenario(opened: Opened) -> None:
        stream, wire = await opened.begun()
        for number in range(1, 1000):
            wire.send(in_chunk(token(number)))
            assert (await anext(stream)).token_ids == (number,)
        wire.send(in_chunk(token(1000, last=True) + USAGE + DONE) + LAST)
        assert ids([chunk async for chunk in stream]) == [1000]
        assert wire.pauses == 0

    run(scenario)


def test_who_waits_when_another_task_closes_the_stream_finds_its_end() -> None:
    async def scenario(opened: Opened) -> None:
        stream, wire = await opened.begun()
        waiting = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        await stream.aclose()  # type: ignore[attr-defined]
        assert await waiting is None
        await asyncio.sleep(0)
        assert wire.aborted

    run(scenario)


def test_a_stream_that_is_closed_before_the_engine_answers_leaves_no_connection() -> None:
    async def scenario(opened: Opened) -> None:
        stream = opened.client.start_generate(REQUEST)
        waiting = asyncio.ensure_future(anext(stream, None))
        wire = await opened.asked.get()
        await stream.aclose()  # type: ignore[attr-defined]
        wire.send(HEAD + in_chunk(token(0)))
        assert await waiting is None
        await asyncio.sleep(0)
        assert wire.aborted

    run(scenario)


@settings(max_examples=100)
@given(st.data())
def test_no_token_is_lost_or_doubled_however_it_comes_and_is_taken(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12), "tokens")
    sizes = data.draw(st.lists(st.sampled_from([200, 20_000, 70_000]), min_size=count, max_size=count))
    events = [token(number + 1, last=number + 1 == count, size=size) for number, size in enumerate(sizes)]
    whole = in_chunk(b"".join(events[:-1]) or b": nothing\n\n") + in_chunk(events[-1] + USAGE + DONE) + LAST
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6), "cuts"))
    pieces = [
        whole[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True) if begin < end
    ]
    takes = data.draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)), "taken between")

    async def scenario(opened: Opened) -> None:
        stream, wire = await opened.begun()
        taken: list[GenerationChunk] = []

        taking: asyncio.Task[None] | None = None
        for piece, takes_now in zip(pieces, takes, strict=True):
            if takes_now and taking is None:
                taking = asyncio.create_task(take_all(stream, taken))
            wire.send(piece)
            for _ in range(4 * takes_now):
                await asyncio.sleep(0)
        await (taking or take_all(stream, taken))
        assert ids(taken) == list(range(1, count + 1))
        assert taken[-1].finish_reason == "stop"
        assert not wire.paused

    run(scenario)


def test_an_engine_that_is_held_back_is_not_silent() -> None:
    """Its silence begins when it is read again; then it is told of after what came before."""

    async def scenario(opened: Opened) -> None:
        clock = asyncio.get_running_loop().time
        stream, wire = await opened.begun()
        for number in range(1, 101):
            wire.send(in_chunk(token(number)))
        assert wire.paused
        await asyncio.sleep(10 * SILENCE_S)
        assert not wire.aborted
        assert ids([await anext(stream) for _ in range(100)]) == list(range(1, 101))
        began = clock()
        with pytest.raises(EngineUnavailable, match="does not answer"):
            await anext(stream)
        assert SILENCE_S <= clock() - began <= 1.2 * SILENCE_S
        assert wire.aborted

    run(scenario)


def test_silence_counts_from_the_last_piece_although_its_chunks_wait() -> None:
    """Fewer than would hold it back: it could have gone on. What it said is given out first."""

    async def scenario(opened: Opened) -> None:
        stream, wire = await opened.begun()
        wire.send(in_chunk(token(1) + token(2)))
        await asyncio.sleep(2 * SILENCE_S)
        assert wire.aborted
        assert [(await anext(stream)).token_ids for _ in range(2)] == [(1,), (2,)]
        with pytest.raises(EngineUnavailable, match="does not answer"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(scenario)


def test_an_engine_that_is_given_up_while_it_is_held_back() -> None:
    async def scenario(opened: Opened) -> None:
        stream, wire = await opened.begun()
        for number in range(1, 101):
            wire.send(in_chunk(token(number)))
        assert wire.paused
        held = wire.arrived // len(in_chunk(token(50)))
        opened.client.give_up("is being drained")
        assert wire.aborted
        taken: list[GenerationChunk] = []
        with pytest.raises(EngineUnavailable, match="is being drained"):
            await take_all(stream, taken)
        assert ids(taken) == list(range(1, len(taken) + 1))
        assert abs(len(taken) - held) <= 1

    run(scenario)


def test_leaving_a_stream_that_is_held_back_leaves_the_engine() -> None:
    async def scenario(opened: Opened) -> None:
        stream, wire = await opened.begun()
        for number in range(1, 101):
            wire.send(in_chunk(token(number)))
        assert wire.paused
        await stream.aclose()  # type: ignore[attr-defined]
        assert wire.aborted
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(scenario)


def test_a_connection_that_was_held_back_serves_the_next_request() -> None:
    async def scenario(opened: Opened) -> None:
        end = in_chunk(token(100, last=True) + USAGE + DONE) + LAST
        for _ in range(3):
            stream, wire = await opened.begun()
            for number in range(1, 100):
                wire.send(in_chunk(token(number)))
            assert wire.paused
            wire.send(end)
            assert ids([chunk async for chunk in stream]) == list(range(1, 101))
        assert len(opened.wires) == 1
        assert opened.wires[0].requests == 3

    run(scenario)


def test_over_a_socket_the_engine_waits_for_who_does_not_read() -> None:
    """It cannot send more than the buffers of the kernel hold, until somebody reads."""
    count, size = 48, 2**20
    sent: list[int] = []

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for number in range(count):
            writer.write(in_chunk(token(number, size=size)))
            await writer.drain()
            sent.append(number)
        writer.write(in_chunk(token(count, last=True) + USAGE + DONE) + LAST)
        await reader.read()  # until the router leaves
        writer.close()
        left.set()

    async def main() -> None:
        async with await asyncio.start_server(engine, "127.0.0.1", 0) as server:
            client = client_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            stream = client.start_generate(REQUEST)
            try:
                assert (await anext(stream)).token_ids == (0,)
                before = -1
                while before != len(sent):
                    before = len(sent)
                    await asyncio.sleep(0.05)
                assert len(sent) < count
                assert ids([chunk async for chunk in stream]) == list(range(1, count + 1))
            finally:
                await client.close()
            async with asyncio.timeout(10):
                await left.wait()
            assert len(sent) == count

    left = asyncio.Event()
    asyncio.run(main())
