"""The whole hand-off between two engines, over every transport: same tokens, exact counts, nothing kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from microserving.engine.async_engine import AsyncEngine
from microserving.engine.config import EngineConfig
from microserving.engine.engine import Engine
from microserving.engine.fake_runner import TINY_LAYOUT, FakeRunner, FakeTokenizer
from microserving.engine.handoff import EngineIdentity, HandoffReceiver, HandoffSender
from microserving.engine.runner import RunnerChunk
from microserving.errors import LeaseError
from microserving.protocol.generation import GenerationRequest, SamplingParams, StopParams
from microserving.transports import TRANSPORTS, Transport, create_transport
from microserving.transports.fake import FakeNetwork, FakeTransport

SECRET = b"a secret of the cluster"
SEEDED = SamplingParams(temperature=0.8, seed=7)


@dataclass
class Node:
    engine: AsyncEngine
    receiver: HandoffReceiver
    sender: HandoffSender

    async def generate(self, request_id: str, prompt: tuple[int, ...], begin: int | None = None) -> list[int]:
        request = GenerationRequest(request_id, prompt, SEEDED, StopParams(max_tokens=12))
        tokens: list[int] = []
        async for chunk in self.engine.generate(request, begin):
            tokens.extend(chunk.token_ids)
        return tokens


@asynccontextmanager
async def _node(
    name: str,
    transport: Transport,
    pages: int,
    before_run: Callable[[Sequence[RunnerChunk]], None] | None = None,
) -> AsyncIterator[Node]:
    memory = transport.allocate(pages * TINY_LAYOUT.bytes_per_page)
    runner = FakeRunner(TINY_LAYOUT, total_pages=pages, memory=memory)
    runner.before_run = before_run
    config = EngineConfig(node_id=name, chunk_size_tokens=32, threads=1)
    engine = AsyncEngine(Engine(runner, FakeTokenizer(), config))
    engine.engine.on_revoked = transport.revoke
    await engine.start()
    transport.serve(name, "e1", pages, engine.engine)
    sender = HandoffSender(transport, engine, TINY_LAYOUT, "m1", SECRET, timeout_s=10)
    receiver = HandoffReceiver(EngineIdentity(name, "e1", 0), TINY_LAYOUT, "m1", SECRET)
    try:
        yield Node(engine, receiver, sender)
    finally:
        await engine.stop()
        await sender.close()
        transport.close()


def _transports(name: str, tmp_path: Path) -> tuple[Transport, Transport]:
    if name == "fake":
        network = FakeNetwork()
        return FakeTransport(network=network), FakeTransport(network=network)
    one, two = (create_transport(name, runtime_dir=tmp_path / "run") for _ in range(2))
    return one, two


@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_a_hand_off_changes_no_token_and_moves_exactly_what_it_says(name: str, tmp_path: Path) -> None:
    async def one(prefill: Node, decode: Node, number: int) -> None:
        length = (2, 15, 16, 17, 33, 100, 130)[number]
        prompt = tuple((i * 7 + number) % 200 for i in range(length))
        end = (length - 1, length // 2 + 1)[number % 2]
        reserved = await decode.engine.prep_recv(f"r{number}", prompt, end)
        sent = await prefill.sender.send(
            prompt, 0, end, decode.receiver.descriptor(reserved), 0, f"send-{number}"
        )
        assert (sent.tokens_computed, sent.tokens_sent) == (end, end)
        assert sent.bytes_sent == end * TINY_LAYOUT.bytes_per_token
        assert 0 < sent.transfer_ms < sent.exposed_ms
        assert all(len(step) == TINY_LAYOUT.layers for step in sent.layer_times_ns)
        tokens = await decode.generate(f"r{number}", prompt, begin=end)
        assert tokens == await prefill.generate(f"alone-{number}", prompt)
        assert len(tokens) == 12

    async def main() -> None:
        sending, receiving = _transports(name, tmp_path)
        async with _node("p0", sending, 40) as prefill, _node("d0", receiving, 64) as decode:
            await asyncio.gather(*(one(prefill, decode, number) for number in range(7)))
            for node, total in ((prefill, 40), (decode, 64)):
                load = node.engine.load()
                assert (load.free_pages + load.evictable_pages, load.reserved, load.running) == (total, 0, 0)

    asyncio.run(main())


@pytest.mark.case("PD-03")
@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_a_lease_that_ends_stops_its_writer_before_the_next_steps(name: str, tmp_path: Path) -> None:
    prompt = tuple(range(180))  # six steps of 32
    computing, go_on = threading.Event(), threading.Event()
    runs: list[None] = []

    def before_run(_: Sequence[RunnerChunk]) -> None:
        runs.append(None)
        computing.set()
        assert go_on.wait(10)

    async def main() -> None:
        sending, receiving = _transports(name, tmp_path)
        async with (
            _node("p0", sending, 40, before_run) as prefill,
            _node("d0", receiving, 64) as decode,
        ):
            reserved = await decode.engine.prep_recv("r", prompt, 180)
            descriptor = decode.receiver.descriptor(reserved)
            task = asyncio.create_task(prefill.sender.send(prompt, 0, 180, descriptor, 0, "s"))
            assert await asyncio.to_thread(computing.wait, 10)
            assert decode.engine.abort("r")
            assert decode.engine.load().quarantined_pages == 12
            async with asyncio.timeout(10):
                while prefill.engine.engine.load().counters.aborts == 0:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.002)
            assert decode.engine.load().quarantined_pages == 12  # the step still puts
            go_on.set()
            with pytest.raises(LeaseError, match="ended"):
                await task
            assert len(runs) == 1
            async with asyncio.timeout(10):
                while decode.engine.load().quarantined_pages:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.002)
            for node, total in ((prefill, 40), (decode, 64)):
                load = node.engine.load()
                assert load.free_pages + load.evictable_pages == total

    asyncio.run(main())
