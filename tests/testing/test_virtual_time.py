"""The clock jumps, the order stays, nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from microserving.testing.virtual_time import NothingHappensError, run_virtual


def test_hours_pass_at_once_and_in_order() -> None:
    async def note(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, asyncio.get_running_loop().time()))

    async def main() -> float:
        await asyncio.gather(note(7200.0), note(0.5), note(3600.0))
        return asyncio.get_running_loop().time()

    seen: list[tuple[float, float]] = []
    assert run_virtual(main()) == pytest.approx(7200.0)
    assert [seconds for seconds, _ in seen] == [0.5, 3600.0, 7200.0]
    assert all(at == pytest.approx(seconds) for seconds, at in seen)


def test_a_timeout_ends_a_wait_and_a_busy_one_too() -> None:
    async def busy() -> None:
        while asyncio.get_running_loop().time() >= 0:  # noqa: ASYNC110 - what is tried here
            await asyncio.sleep(0)

    async def main() -> None:
        for waiting in (asyncio.Event().wait(), busy()):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, 10.0)

    run_virtual(main())


def test_waiting_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingHappensError):
        run_virtual(main())


def test_what_is_left_is_ended_and_what_clings_is_forgotten() -> None:
    async def polite() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("polite")

    async def clinging() -> None:
        while True:
            try:
                await asyncio.sleep(1e9)
            except asyncio.CancelledError:
                ended.append("cancelled")

    async def main() -> None:
        tasks.extend([asyncio.create_task(polite()), asyncio.create_task(clinging())])
        await asyncio.sleep(1.0)

    tasks: list[asyncio.Task[None]] = []
    ended: list[str] = []
    run_virtual(main())
    assert ended[:2] in (["polite", "cancelled"], ["cancelled", "polite"])


def test_threads_work_in_place() -> None:
    async def main() -> tuple[int, str]:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        return await asyncio.to_thread(len, "four"), "done"

    assert run_virtual(main()) == (4, "done")
