"""A reservation lives as long as its request needs it, and nobody renews it a moment longer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from contextlib import aclosing

import pytest

from microserving.errors import EngineUnavailable, LeaseError, MicroservingError
from microserving.program import Received, RemoteSendResult, Request
from microserving.program.testing import FakeCluster, FakeEngine, collect, make_request
from microserving.router.alarms import Alarms
from microserving.router.renewals import Renewals

from .hosting import Hosted, generation

REQUEST = make_request(range(8))
SHORT_TTL_S = 0.15


class Engine(FakeEngine):
    """Answers renewals from ``answers``, then says ``asked_for_more`` and answers no more."""

    def __init__(self, answers: list[float | MicroservingError | None]) -> None:
        super().__init__("decode-0", "decode")
        self.answers = answers
        self.asked_for_more = asyncio.Event()

    async def renew(self, request: Request) -> float | None:
        if not self.answers:
            self.asked_for_more.set()
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, MicroservingError):
            raise answer
        return answer


class Hasty(Alarms):
    """Notes how long the pauses are, and does not wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def set(self, key: Hashable, when: float, alarm: Callable[[], None]) -> None:
        now = asyncio.get_running_loop().time()
        self.pauses.append(when - now)
        super().set(key, now, alarm)


class SlowHandOff(FakeCluster):
    """`remote_send` waits until the decode engine was asked to renew ``wanted`` times."""

    def __init__(self, wanted: int, lease_ttl_s: float | None = SHORT_TTL_S) -> None:
        super().__init__()
        self.renewed = asyncio.Semaphore(0)
        self.decode_engine, self._sender = self["decode-0"], self["prefill-0"]
        self.decode_engine.lease_ttl_s = lease_ttl_s
        self._renew, self._send, self._wanted = self.decode_engine.renew, self._sender.remote_send, wanted
        self.decode_engine.renew = self._counted  # type: ignore[method-assign]
        self._sender.remote_send = self._slow  # type: ignore[method-assign]

    async def _counted(self, request: Request) -> float | None:
        self.renewed.release()
        return await self._renew(request)

    async def _slow(self, request: Request, *, to: Received) -> RemoteSendResult:
        for _ in range(self._wanted):
            await self.renewed.acquire()
        return await self._send(request, to=to)

    @property
    def verbs(self) -> list[str]:
        """What the decode engine was asked, in order."""
        return [call.verb for call in self.decode_engine.calls]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """And hold that no task is left."""

    async def all_of_it() -> None:
        async with asyncio.timeout(10):
            await scenario()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(all_of_it())


def test_a_third_of_the_lease_goes_by_between_renewals() -> None:
    async def scenario() -> None:
        engine, alarms = Engine([30.0, 12.0, 0.0]), Hasty()
        renewing = Renewals(alarms)
        renewing.start(engine, REQUEST, 30.0)
        await engine.asked_for_more.wait()
        assert alarms.pauses == pytest.approx([10.0, 10.0, 4.0, 0.05], abs=0.01)
        assert len(renewing) == 1
        await renewing.close()
        await renewing.close()
        assert len(renewing) == 0

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "warned", "goes_on"),
    [
        (None, False, False),
        (LeaseError("expired"), True, False),
        (EngineUnavailable("does not answer"), True, True),
    ],
)
def test_what_ends_renewing(
    answer: MicroservingError | None, warned: bool, goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario() -> None:
        engine, alarms = Engine([answer]), Hasty()
        renewing = Renewals(alarms)
        renewing.start(engine, REQUEST, 30.0)
        if goes_on:
            await engine.asked_for_more.wait()
        else:
            while renewing:  # noqa: ASYNC110 - what is tested has no event
                await asyncio.sleep(0)
        assert len(alarms.pauses) == 1 + goes_on
        await renewing.close()

    run(scenario)
    assert [record.getMessage() for record in caplog.records] == (
        [f"decode-0 did not renew the lease of request request-0: {answer}"] if warned else []
    )


def test_a_slow_prefill_keeps_its_reservation() -> None:
    async def scenario() -> None:
        hosted = Hosted("prefill_decode", cluster := SlowHandOff(2))
        chunks = await collect(hosted.dispatcher.generate(generation()))
        assert chunks[-1].finish_reason == "stop"
        assert cluster.verbs == ["prep_recv", "renew", "renew", "start_generate"]
        await hosted.settle()

    run(scenario)


def test_a_client_that_leaves_ends_renewing() -> None:
    async def scenario() -> None:
        hosted = Hosted("prefill_decode", cluster := SlowHandOff(10**6))
        task = asyncio.ensure_future(collect(hosted.dispatcher.generate(generation())))
        await cluster.renewed.acquire()
        task.cancel()
        await asyncio.wait([task])
        await hosted.settle()
        assert cluster.verbs[-1] == "abort"

    run(scenario)


def test_an_engine_that_names_no_lease_is_left_alone() -> None:
    async def scenario() -> None:
        hosted = Hosted("prefill_decode", cluster := SlowHandOff(0, lease_ttl_s=None))
        await collect(hosted.dispatcher.generate(generation()))
        assert cluster.verbs == ["prep_recv", "start_generate"]
        await hosted.settle()

    run(scenario)


def test_generating_ends_renewing() -> None:
    """From then on the engine keeps what it has for the generation."""

    async def scenario() -> None:
        hosted = Hosted("prefill_decode", SlowHandOff(1))
        async with aclosing(hosted.dispatcher.generate(generation())) as chunks:  # type: ignore[type-var]
            await anext(chunks)
            names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
            assert not [name for name in names if "Renewals" in name]
        await hosted.settle()

    run(scenario)
