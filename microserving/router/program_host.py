"""Holds the program in charge, lends it to requests, and runs its ``plan``.

Does not know requests: ``dispatch`` acquires a program for every attempt and says how that ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Literal

from microserving.program import Cluster, Program
from microserving.router.program_loader import LoadedProgram

_logger = logging.getLogger(__name__)

Outcome = Literal["ok", "program_failed", "other"]
"""How a use of a program ended. program_failed: it raised a bug, hung or yielded rubbish; ``other`` is an engine's or a
client's doing."""


class ProgramHost:
    """cluster: what the plan gets."""

    def __init__(self, program: LoadedProgram, cluster: Cluster) -> None:
        self.program = program
        self._cluster = cluster
        self._uses: Counter[LoadedProgram] = Counter()
        self._plan: asyncio.Task[None] | None = None

    @property
    def uses(self) -> int:
        """How many attempts use a program now."""
        return self._uses.total()

    def start(self) -> None:
        """Run the program's ``plan``, if it has one."""
        if type(self.program.instance).plan is not Program.plan:
            self._plan = asyncio.create_task(self._run_plan())

    async def stop(self) -> None:
        """End the plan. Idempotent."""
        if self._plan is not None:
            self._plan.cancel()
            await asyncio.wait([self._plan])

    def acquire(self) -> LoadedProgram:
        """The program in charge, for one attempt; must be given back with ``release``."""
        self._uses[self.program] += 1
        return self.program

    def release(self, program: LoadedProgram, outcome: Outcome) -> None:  # noqa: ARG002 - what rollback will need
        """An attempt with ``program`` ended. Once per ``acquire``."""
        self._uses[program] -= 1
        if not self._uses[program]:
            del self._uses[program]

    async def _run_plan(self) -> None:
        try:
            await self.program.instance.plan(self._cluster)
        except Exception as error:  # noqa: BLE001 - the wall: a plan may raise anything, requests go on
            where = self.program.locate(error)
            _logger.error("the router program's plan failed at %s: %r", where, error)
