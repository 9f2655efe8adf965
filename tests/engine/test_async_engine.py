"""The engine thread and its bridge to asyncio, over the fake runner."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from microserving.engine.async_engine import AsyncEngine, _Stream
from microserving.engine.config import EngineConfig
from microserving.engine.engine import Engine
from microserving.engine.fake_runner import FakeRunner, FakeTokenizer
from microserving.engine.jobs import Reservation, SendJob
from microserving.engine.runner import RunnerChunk
from microserving.errors import (
    EngineUnavailable,
    InvalidRequest,
    KVExhausted,
    Overloaded,
    RequestAborted,
    RequestConflict,
)
from microserving.protocol.generation import GenerationChunk, GenerationRequest, SamplingParams, StopParams
from microserving.transports.base import Lease, LeaseGuard

from .harness import GREEDY, SEEDED, greedy_reference, prompt_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def running(
    *, pages: int = 64, reserve_wait_s: float = 5.0, max_waiting: int = 64, **config: Any
) -> AsyncIterator[AsyncEngine]:
    options = EngineConfig(reserve_wait_s=reserve_wait_s, **config)
    engine = Engine(FakeRunner(total_pages=pages), FakeTokenizer(), options)
    served = AsyncEngine(engine, reserve_wait_s=reserve_wait_s, max_waiting=max_waiting)
    await served.start()
    try:
        yield served
    finally:
        await served.stop()


def runner(engine: AsyncEngine) -> FakeRunner:
    found = engine.engine._runner
    assert isinstance(found, FakeRunner)
    return found


def request(
    request_id: str, prompt: Sequence[int], max_tokens: int = 8, sampling: SamplingParams = GREEDY
) -> GenerationRequest:
    return GenerationRequest(request_id, tuple(prompt), sampling, StopParams(max_tokens=max_tokens))


async def tokens(engine: AsyncEngine, wanted: GenerationRequest, begin: int | None = None) -> list[int]:
    chunks = [chunk async for chunk in engine.generate(wanted, begin)]
    assert chunks[-1].finish_reason == "length"
    return [token for chunk in chunks for token in chunk.token_ids]


def assert_idle(engine: AsyncEngine) -> None:
    load = engine.load()
    assert (load.running, load.waiting, load.reserved) == (0, 0, 0)
    assert (load.free_pages + load.evictable_pages, load.pinned_pages) == (load.total_pages, 0)
    engine.engine.check()


class Gate:
    """Stops the engine thread at the begin of its next step until it is opened."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        runner(engine).before_run = self._hold

    def _hold(self, chunks: Sequence[RunnerChunk]) -> None:
        self.reached.set()
        assert self.opened.wait(10)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 10)


async def settled(engine: AsyncEngine) -> None:
    """Until the engine has no sequence any more: a request that comes after them all has been served."""
    await tokens(engine, request("last", [1], 1))


async def test_a_stream_says_what_the_model_says() -> None:
    async with running() as engine:
        assert await tokens(engine, request("r", prompt_of(20))) == greedy_reference(prompt_of(20), 8)
        assert_idle(engine)


async def test_eight_streams_at_once() -> None:
    prompts = [prompt_of(5 + 9 * i, salt=i) for i in range(8)]
    async with running(chunk_size_tokens=16) as engine:
        alone = [await tokens(engine, request("alone", p, 12, SEEDED)) for p in prompts]
        together = await asyncio.gather(
            *(tokens(engine, request(f"r{i}", p, 12, SEEDED)) for i, p in enumerate(prompts))
        )
        assert together == alone
        assert_idle(engine)


async def test_a_refused_request_raises_before_its_first_chunk() -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest):
            await anext(engine.generate(request("r", [])))


@pytest.mark.case("STR-01")
async def test_closing_a_stream_frees_its_pages() -> None:
    async with running() as engine:
        stream = engine.generate(request("r", prompt_of(20), 900))
        await anext(stream)
        await stream.aclose()
        await settled(engine)
        assert_idle(engine)
        assert engine.load().counters.aborts == 1


async def test_cancelling_a_reader_frees_its_pages() -> None:
    async with running() as engine:
        gate = Gate(engine)
        reader = asyncio.create_task(tokens(engine, request("r", prompt_of(20), 900)))
        await gate.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        gate.opened.set()
        await settled(engine)
        assert_idle(engine)


async def test_a_finished_stream_does_not_abort_its_successor() -> None:
    async with running() as engine:
        stream = engine.generate(request("r", [1, 2], 1))
        assert (await anext(stream)).finish_reason == "length"
        successor = engine.generate(request("r", [1, 2], 3))
        first = await anext(successor)
        await stream.aclose()
        rest = [chunk async for chunk in successor]
        assert sum(len(chunk.token_ids) for chunk in [first, *rest]) == 3


async def test_abort_by_id_ends_the_stream_with_an_error() -> None:
    async with running() as engine:
        stream = engine.generate(request("r", prompt_of(20), 900))
        await anext(stream)
        assert engine.abort("r")
        with pytest.raises(RequestAborted):
            async for _ in stream:
                pass
        assert not engine.abort("r")


async def test_an_abort_waits_for_no_running_step() -> None:
    async with running(pages=4) as engine:
        gate = Gate(engine)
        reservation = await engine.prep_recv("a", prompt_of(40), 40)
        generation = asyncio.create_task(tokens(engine, request("r", [1, 2], 4)))
        await gate.wait()
        waiting = asyncio.create_task(engine.prep_recv("b", prompt_of(40), 40))
        await asyncio.sleep(0)
        assert engine.abort("r")
        with pytest.raises(RequestAborted):
            await generation
        assert engine.abort(reservation.request_id)
        assert (await waiting).request_id == "b"
        assert not gate.opened.is_set(), "the step still runs"
        gate.opened.set()


async def test_a_slow_reader_finds_its_chunks_merged() -> None:
    stream = _Stream()
    stream.put(GenerationChunk("a", (1,), None, 5, 1))
    stream.put(GenerationChunk("b", (2,), None, 5, 2))
    assert await stream.next() == GenerationChunk("ab", (1, 2), None, 5, 2)
    stream.put(GenerationChunk("c", (3,), None, 5, 3))
    stream.put(GenerationChunk("d", (4,), "stop", 5, 4))
    assert await stream.next() == GenerationChunk("cd", (3, 4), "stop", 5, 4)


async def test_chunks_come_before_the_error_that_followed_them() -> None:
    stream = _Stream()
    stream.put(GenerationChunk("a", (1,), None, 5, 1))
    stream.put(RequestAborted("aborted"))
    assert (await stream.next()).text == "a"
    with pytest.raises(RequestAborted):
        await stream.next()


async def test_one_call_to_the_loop_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        calls, steps = [], []
        loop = asyncio.get_running_loop()
        crossing = loop.call_soon_threadsafe
        runner(engine).before_run = lambda chunks: steps.append(len(chunks))
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *a: (calls.append(1), crossing(*a))[1])
        await asyncio.gather(*(tokens(engine, request(f"r{i}", prompt_of(9), 20)) for i in range(6)))
        assert max(steps) == 6
        assert len(calls) <= len(steps)


async def test_an_idle_engine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        await settled(engine)
        await engine.prep_recv("r", [1, 2], 1)  # a lease in 30 s is no reason to wake before
        steps = []
        step = engine.engine.step
        monkeypatch.setattr(engine.engine, "step", lambda: (steps.append(1), step())[1])
        await asyncio.sleep(0.1)
        assert len(steps) <= 1


async def hand_over(
    prefill: AsyncEngine, decode: AsyncEngine, request_id: str, prompt: Sequence[int], end: int
) -> None:
    reservation = await decode.prep_recv(request_id, prompt, end)
    lease = Lease("decode", "epoch", request_id, reservation.lease_id)
    assert decode.engine.begin_write(lease)
    done = await prefill.send(job(decode, reservation, prompt))
    assert done.tokens_sent == reservation.end
    decode.engine.end_write(lease, True)


def job(decode: AsyncEngine, reservation: Reservation, prompt: Sequence[int]) -> SendJob:
    pool, guard = runner(decode).remote_pool, LeaseGuard(reservation.lease_id, reservation.lease_id)
    pool.leases[guard.word] = guard.lease_id
    begin, end = reservation.prefix_matched_length, reservation.end
    return SendJob(
        reservation.request_id, tuple(prompt), begin, end, pool, "decode", reservation.slots, guard
    )


async def test_eight_hand_offs_at_once() -> None:
    prompts = [prompt_of(5 + 9 * i, salt=i) for i in range(8)]

    async def one(i: int) -> list[int]:
        await hand_over(prefill, decode, f"r{i}", prompts[i], len(prompts[i]) - 1)
        return await tokens(decode, request(f"r{i}", prompts[i], 6), begin=-1)

    async with running(chunk_size_tokens=32) as prefill, running(pages=40, chunk_size_tokens=32) as decode:
        got = await asyncio.gather(*map(one, range(8)))
        assert got == [greedy_reference(prompt, 6) for prompt in prompts]
        assert decode.load().counters.prompt_tokens_computed == 8
        assert_idle(prefill)
        assert_idle(decode)


async def test_a_cancelled_send_returns_after_its_last_put() -> None:
    async with running(chunk_size_tokens=8) as prefill, running() as decode:
        reservation = await decode.prep_recv("r", prompt_of(40), 40)
        gate = Gate(prefill)
        sending = asyncio.create_task(prefill.send(job(decode, reservation, prompt_of(40))))
        await gate.wait()
        for _ in range(3):  # also when it is cancelled again and again
            sending.cancel()
            await asyncio.sleep(0)
        assert not sending.done(), "the step with its put still runs"
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert_idle(prefill)


async def test_a_send_that_waits_for_the_pages_of_its_own_lease_is_given_up() -> None:
    async with running(pages=4, reserve_wait_s=0.05) as engine:
        reservation = await engine.prep_recv("r", prompt_of(40), 40)
        with pytest.raises(KVExhausted):
            await engine.send(job(engine, reservation, prompt_of(40)))
        assert engine.abort("r")
        assert_idle(engine)


async def test_a_send_of_nothing() -> None:
    async with running() as prefill, running() as decode:
        reservation = await decode.prep_recv("r", [1], 0)
        assert (await prefill.send(job(decode, reservation, [1]))).tokens_sent == 0
        assert len(await tokens(decode, request("r", [1], 3), begin=0)) == 3


async def test_prep_recv_waits_for_pages_in_order() -> None:
    async with running(pages=4) as engine:
        await engine.prep_recv("a", prompt_of(60), 60)
        second = asyncio.create_task(engine.prep_recv("b", prompt_of(60), 60))
        third = asyncio.create_task(engine.prep_recv("c", [1, 2], 1))
        await asyncio.sleep(0)
        assert engine.load().waiting == 2
        assert engine.abort("a")
        assert (await second).request_id == "b"
        assert not third.done()
        assert engine.abort("b")
        assert (await third).request_id == "c"


async def test_prep_recv_gets_the_pages_of_a_lease_that_expires() -> None:
    async with running(pages=4, lease_ttl_s=0.05) as engine:
        await engine.prep_recv("a", prompt_of(60), 60)
        assert (await engine.prep_recv("b", prompt_of(60), 60)).request_id == "b"


async def test_prep_recv_gets_the_pages_of_a_generation_that_ends() -> None:
    async with running(pages=4) as engine:
        gate = Gate(engine)
        generation = asyncio.create_task(tokens(engine, request("a", prompt_of(40), 4)))
        await gate.wait()
        waiting = asyncio.create_task(engine.prep_recv("b", prompt_of(60), 60))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.opened.set()
        assert (await waiting).request_id == "b"
        assert await generation == greedy_reference(prompt_of(40), 4)


async def test_prep_recv_gives_up() -> None:
    async with running(pages=4, reserve_wait_s=0.02) as engine:
        await engine.prep_recv("a", prompt_of(60), 60)
        with pytest.raises(KVExhausted) as refused:
            await engine.prep_recv("b", prompt_of(60), 60)
        assert refused.value.retry_after_s
        assert engine.load().waiting == 0


async def test_the_queue_for_pages_is_bounded() -> None:
    async with running(pages=4, max_waiting=1) as engine:
        await engine.prep_recv("a", prompt_of(60), 60)
        waiting = asyncio.create_task(engine.prep_recv("b", prompt_of(60), 60))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await engine.prep_recv("c", [1, 2], 1)
        assert not isinstance(refused.value, KVExhausted)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert engine.load().waiting == 0


async def test_one_who_stops_waiting_lets_the_next_one_pass() -> None:
    async with running(pages=4, memory_threshold=1.0) as engine:
        await engine.prep_recv("a", prompt_of(40), 40)
        big = asyncio.create_task(engine.prep_recv("b", prompt_of(60), 60))
        small = asyncio.create_task(engine.prep_recv("c", [1, 2], 1))
        await asyncio.sleep(0)
        big.cancel()
        assert (await small).request_id == "c"


async def test_pages_that_came_with_a_cancellation_are_given_back() -> None:
    async with running(pages=4) as engine:
        await engine.prep_recv("a", prompt_of(60), 60)
        waiting = asyncio.create_task(engine.prep_recv("b", prompt_of(60), 60))
        await asyncio.sleep(0)
        assert engine.abort("a")
        engine._serve_waiters()  # b has its pages, its task has not run yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert_idle(engine)


async def test_errors_other_than_missing_pages_end_the_wait() -> None:
    async with running(pages=4) as engine:
        await engine.prep_recv("a", prompt_of(60), 60)
        waiting = asyncio.create_task(engine.prep_recv("b", prompt_of(60), 60))
        twin = asyncio.create_task(engine.prep_recv("b", prompt_of(60), 60))
        await asyncio.sleep(0)
        engine.abort("a")
        assert (await waiting).request_id == "b"
        with pytest.raises(RequestConflict):
            await twin


async def test_stop_ends_everything_outstanding() -> None:
    async with running(pages=8) as engine:
        gate = Gate(engine)
        stream = asyncio.create_task(tokens(engine, request("r", prompt_of(20), 90)))
        await gate.wait()
        queued = asyncio.create_task(tokens(engine, request("q", prompt_of(20), 90)))
        waiting = asyncio.create_task(engine.prep_recv("w", prompt_of(120), 120))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        assert not engine.healthy
        gate.opened.set()
        await stopping
        for outstanding in (stream, queued, waiting):
            with pytest.raises(EngineUnavailable):
                await outstanding
        with pytest.raises(EngineUnavailable):
            await tokens(engine, request("late", [1]))
        assert "engine" not in [thread.name for thread in threading.enumerate()]
        await engine.stop()
        assert_idle(engine)


async def test_a_thread_that_fails_ends_its_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as engine:
        assert engine.healthy

        def broken() -> bool:
            raise RuntimeError("the books do not balance")

        monkeypatch.setattr(engine.engine, "step", broken)
        with pytest.raises(EngineUnavailable) as failed:
            await tokens(engine, request("r", [1, 2]))
        assert "books" not in failed.value.message
        assert not engine.healthy
        assert "the books do not balance" in caplog.text


@pytest.mark.case("PD-07")
@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_cancellations_leaves_nothing(seed: int) -> None:
    """Hand-offs over too few pages, each cancelled at a random moment or not: those that go on are right."""
    rng = random.Random(seed)
    expected = {length: greedy_reference(prompt_of(length), 12) for length in (7, 30, 45)}
    outcomes: list[str] = []

    async def client(i: int) -> None:
        length = rng.choice(list(expected))
        prompt = prompt_of(length)
        task = asyncio.create_task(whole(f"r{i}", prompt, rng.randrange(length + 1)))
        if rng.random() < 0.5:
            asyncio.get_running_loop().call_later(rng.random() * 0.05, task.cancel)
        try:
            assert await task == expected[length]
            outcomes.append("done")
        except asyncio.CancelledError:
            outcomes.append("cancelled")

    async def whole(request_id: str, prompt: list[int], end: int) -> list[int]:
        try:
            if end:
                await hand_over_or_tell(prefill, decode, request_id, prompt, end)
            return await tokens(decode, request(request_id, prompt, 12), begin=end)
        finally:
            decode.abort(request_id)

    async with (
        running(pages=8, chunk_size_tokens=16) as prefill,
        running(pages=9, chunk_size_tokens=16, reserve_wait_s=30.0) as decode,
    ):
        await asyncio.gather(*map(client, range(40)))
        await settled(prefill)
        await settled(decode)
        assert len(outcomes) == 40
        assert outcomes.count("done") >= 10
        assert_idle(prefill)
        assert_idle(decode)


async def hand_over_or_tell(
    prefill: AsyncEngine, decode: AsyncEngine, request_id: str, prompt: list[int], end: int
) -> None:
    """As ``hand_over``; when the sender stops early, the receiver is told, as a transport does."""
    reservation = await decode.prep_recv(request_id, prompt, end)
    lease = Lease("decode", "epoch", request_id, reservation.lease_id)
    if reservation.end == reservation.prefix_matched_length:
        return
    assert decode.engine.begin_write(lease)
    arrived = False
    try:
        await prefill.send(job(decode, reservation, prompt))
        arrived = True
    finally:
        decode.engine.end_write(lease, arrived)
