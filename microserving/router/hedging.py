"""Two attempts at one request: when the first gives nothing in time, a second one runs beside it; the faster one wins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from microserving.protocol.generation import GenerationChunk
from microserving.router.attempt import Attempt


async def race(
    first: Attempt, start_second: Callable[[], Attempt | None], after_s: float
) -> tuple[Attempt, asyncio.Task[GenerationChunk | None]]:
    """The attempt whose first chunk came first (one that failed only wins when the other one did, too), and the task that
    has read it.

    start_second: called when ``first`` gave nothing for ``after_s``; None when there is nobody to try. Who lost is left
    where it is: its ``release`` ends it. Cancelled, both are.
    """
    reading = {first.read_ahead(): first}
    await asyncio.wait(reading, timeout=after_s)
    if not any(task.done() for task in reading):
        second = start_second()
        if second is not None:
            reading[second.read_ahead()] = second
    pending = set(reading)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=list(reading).index):
            if task.exception() is None or not pending:
                return reading[task], task
