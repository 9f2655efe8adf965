"""A process ends when it is told to, whatever runs in it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from microserving.front import run_on_uvloop, serving


def test_a_task_that_swallows_its_cancellation_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "GRACE_S", 0.02)
    ended: list[str] = []

    async def clings() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                ended.append("not I")

    async def lets_go() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            ended.append("I")

    async def main() -> None:
        tasks = [asyncio.create_task(work()) for work in (clings, lets_go)]
        await asyncio.wait(tasks, timeout=0)

    run_on_uvloop(main())
    assert sorted(ended) == ["I", "not I"]
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "clings" in record.getMessage()


def test_what_ends_the_main_task_is_raised() -> None:
    async def main() -> None:
        asyncio.create_task(asyncio.sleep(3600))  # noqa: RUF006 - nobody waits for it
        raise KeyError("main")

    with pytest.raises(KeyError, match="main"):
        run_on_uvloop(main())
