"""A send that is cancelled, times out, loses its lease or its receiver: everybody hears of it once, and nobody waits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from microserving.engine.jobs import SendJob
from microserving.errors import EngineUnavailable, LeaseError, TransferFailed
from microserving.transports import Connection

from .handoff_setup import Setup


def test_cancelled_while_computing(setup: Setup) -> None:
    """The receiver is told after the engine has stopped, and not before."""
    order: list[str] = []

    async def main() -> None:
        computing, release = asyncio.Event(), asyncio.Event()

        async def before(_: SendJob) -> None:
            computing.set()
            try:
                await asyncio.Event().wait()
            finally:
                await release.wait()  # the last put takes its time
                order.append(f"stopped, told {len(setup.observer.events) - 1}")

        setup.engine.before = before
        sender = setup.sender()
        task = asyncio.create_task(setup._send(sender))
        await computing.wait()
        for _ in range(3):  # anyio cancels again and again
            task.cancel()
            await asyncio.wait([task], timeout=0.01)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sender.close()

    asyncio.run(main())
    assert order == ["stopped, told 0"]
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


@pytest.mark.parametrize("stage", ["begin", "end"])
def test_cancelled_while_a_receiver_is_silent(setup: Setup, stage: str) -> None:
    """Nobody waits for a stopped receiver; it hears of the ending when it goes on."""

    async def main() -> None:
        silent = asyncio.Event()

        def fall_silent() -> None:
            setup.network.silent = True
            silent.set()

        async def before(_: SendJob) -> None:
            fall_silent()

        if stage == "begin":
            fall_silent()
        setup.engine.before = before
        sender = setup.sender()
        task = asyncio.create_task(setup._send(sender))
        await silent.wait()
        while not setup.network._held:  # noqa: ASYNC110 - what was sent to nobody has no event
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sender.close()
        setup.network.resume()

    asyncio.run(main())
    assert setup.observer.events == [("begin", 9), ("end", 9, stage == "end")]
    assert len(setup.engine.jobs) == (stage == "end")


@pytest.mark.parametrize("stage", ["begin", "end"])
def test_a_silent_receiver_costs_the_timeout(setup: Setup, stage: str) -> None:
    async def fall_silent(_: SendJob) -> None:
        setup.network.silent = True

    async def main() -> None:
        setup.engine.before = fall_silent
        setup.network.silent = stage == "begin"
        sender = setup.sender(timeout_s=0.05)
        with pytest.raises(TransferFailed, match=r"did not answer within 0\.05 s"):
            await setup._send(sender)
        setup.network.resume()
        await sender.close()

    asyncio.run(main())
    assert setup.observer.events == [("begin", 9), ("end", 9, stage == "end")]


@pytest.mark.case("PD-40")
def test_receivers_that_are_stopped_do_not_keep_others_waiting(setup: Setup) -> None:
    """However many sends wait for the link to a stopped receiver, one thread does."""
    stopped, release = setup._receiver(setup.observer, "stopped"), threading.Event()
    connect = setup.sending.connect
    asked: list[str] = []

    def slow(engine_id: str, epoch: str, timeout_s: float) -> Connection:
        asked.append(epoch)
        if epoch == "stopped":
            assert release.wait(10)
        return connect(engine_id, epoch, timeout_s)

    setup.sending.connect = slow  # type: ignore[method-assign]

    async def main() -> None:
        sender = setup.sender(monotonic_ns=lambda: 0)
        waiting = [
            asyncio.create_task(
                setup._send(sender, kv_addr_info=setup.descriptor(epoch="stopped", lease_id=number))
            )
            for number in range(100, 300)
        ]
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            assert (await setup._send(sender)).tokens_sent == 38
        assert asked == ["stopped", "e1"]
        for task in waiting[1:]:
            task.cancel()
        await asyncio.wait(waiting[1:], timeout=5)
        assert all(task.cancelled() for task in waiting[1:])  # at once
        release.set()
        assert (await waiting[0]).tokens_sent == 38
        await sender.close()

    asyncio.run(main())
    stopped.close()


@pytest.mark.case("PD-03")
def test_a_revoked_lease_ends_the_computation(setup: Setup) -> None:
    async def revoke(_: SendJob) -> None:
        setup.receiving.revoke(9)
        await asyncio.Event().wait()  # a prefill without end

    setup.engine.before = revoke
    with pytest.raises(LeaseError, match="ended"):
        setup.send()
    assert setup.engine.stopped == 1
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


def test_a_second_send_into_a_lease_does_not_end_the_first(setup: Setup) -> None:
    async def main() -> None:
        computing, go_on = asyncio.Event(), asyncio.Event()

        async def before(_: SendJob) -> None:
            computing.set()
            await go_on.wait()

        setup.engine.before = before
        sender = setup.sender(monotonic_ns=lambda: 0)
        first = asyncio.create_task(setup._send(sender))
        await computing.wait()
        with pytest.raises(LeaseError, match="being written already"):
            await setup._send(sender)
        go_on.set()
        assert (await first).tokens_sent == 38
        await sender.close()

    asyncio.run(main())
    assert setup.observer.events == [("begin", 9), ("end", 9, True)]


def test_closing_ends_what_runs_and_takes_nothing_more(setup: Setup) -> None:
    async def main() -> None:
        computing = asyncio.Event()

        async def before(_: SendJob) -> None:
            computing.set()
            await asyncio.Event().wait()

        setup.engine.before = before
        sender = setup.sender()
        task = asyncio.create_task(setup._send(sender))
        await computing.wait()
        await sender.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sender.close()
        with pytest.raises(EngineUnavailable):
            await setup._send(sender)

    asyncio.run(main())
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]
