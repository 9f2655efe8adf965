"""What the router's `/ready` tells when a role has no engine: whether the program in charge can do without it.

That is tried, not declared: the program is run on engines in memory of just the roles that there are now, with the
settings as it has them now (one that changes its pattern has them in a setting). Does not know how programs are run
(``dry_run``), nor whether there is any engine at all (the front asks ``Dispatcher.ready`` first).
"""

from __future__ import annotations

import asyncio
from collections import Counter

from microserving.errors import NoEngine, ProgramError
from microserving.program import Cluster, setting_types
from microserving.router.config import Setting
from microserving.router.deployment import Deployer
from microserving.router.dry_run import Roles
from microserving.router.program_host import ProgramHost
from microserving.router.program_loader import LoadedProgram

_RETRY_AFTER_S = 1.0
_BELIEVED_S = 1.0
"""How long a trial that failed is believed: it may have been the machine's fault. One that passed is, for good."""

_Case = tuple[LoadedProgram, Roles, str]
"""What a trial depends on; the last is the settings' values."""


class Readiness:
    """cluster: the live engines. deployer: runs the trials."""

    def __init__(self, host: ProgramHost, cluster: Cluster, deployer: Deployer) -> None:
        self._host = host
        self._cluster = cluster
        self._deployer = deployer
        self._lock = asyncio.Lock()
        self._passed: _Case | None = None
        self._failed: tuple[_Case, float] | None = None

    async def check(self) -> None:
        """Raises NoEngine, which names the role, when the program cannot serve with the engines that are up.

        Returns at once while every role has an engine; the first time without takes as long as a trial.
        """
        empty = [role for role in ("prefill", "decode") if not len(getattr(self._cluster, role))]
        program = self._host.program
        if len(empty) != 1 or program.source is None:
            return  # all is there, or nothing, which others tell of
        async with self._lock:
            passed = await self._passes(program)
        if not passed:
            message = f"no {empty[0]} engine is up, and the router program {program.name} needs one"
            raise NoEngine(message, retry_after_s=_RETRY_AFTER_S)

    async def _passes(self, program: LoadedProgram) -> bool:
        count = Counter(engine.role for engine in self._cluster.all)
        roles, settings = Roles(count["prefill"], count["decode"], count["hybrid"]), _settings(program)
        case = program, roles, repr(settings)
        now = asyncio.get_running_loop().time()
        if case == self._passed:
            return True
        if self._failed is not None and self._failed[0] == case and now - self._failed[1] < _BELIEVED_S:
            return False
        assert program.source is not None
        try:
            await self._deployer.check(program.source, settings, roles)
        except ProgramError:
            self._failed = case, asyncio.get_running_loop().time()
            return False
        self._passed = case
        return True


def _settings(program: LoadedProgram) -> dict[str, object]:
    """As they are now, where that is a plain value; else as they were given."""
    now = {name: getattr(program.instance, name, None) for name in setting_types(type(program.instance))}
    return dict(program.settings) | {name: value for name, value in now.items() if isinstance(value, Setting)}
