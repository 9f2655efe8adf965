"""The background task that runs a program's ``plan``, again and again with growing pauses when it raises."""

from __future__ import annotations

import asyncio
import logging

from microserving.program import Cluster, Program
from microserving.router.program_loader import LoadedProgram

_logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STABLE_AFTER_S = 60.0
"""A plan that ran for so long before it raised is started again after the shortest pause."""


def start_plan(program: LoadedProgram, cluster: Cluster) -> asyncio.Task[None] | None:
    """The running plan; cancel it to end it. None when the program has none."""
    if type(program.instance).plan is Program.plan:
        return None
    return asyncio.create_task(_keep_running(program, cluster), name=f"plan-{program.name}")


async def _keep_running(program: LoadedProgram, cluster: Cluster) -> None:
    """Returns when the plan does."""
    clock = asyncio.get_running_loop().time
    pause = FIRST_PAUSE_S
    while True:
        began = clock()
        try:
            await program.instance.plan(cluster)
            return
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the wall: a plan may raise anything
            where = program.locate(error)
            if clock() - began > STABLE_AFTER_S:
                pause = FIRST_PAUSE_S
            _logger.error("the router program's plan failed at %s: %r; again in %g s", where, error, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
