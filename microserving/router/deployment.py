"""Puts another program in charge: read, try on engines in memory, load, switch. One deployment at a time.

A program that does not pass changes nothing. Does not know who asks (``admin``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial

from microserving.errors import ProgramError
from microserving.router.dry_run import DryRun, ProgramFacts, Roles
from microserving.router.dry_run_helper import DryRunHelper
from microserving.router.program_host import ProgramHost, Version
from microserving.router.program_loader import LoadedProgram, ProgramSource, load_source

_logger = logging.getLogger(__name__)


class Deployer:
    """roles: of the engines that there are. refused: how many programs did not pass."""

    def __init__(self, host: ProgramHost, roles: Callable[[], Roles], *, dry_run_timeout_s: float) -> None:
        self.refused = 0
        self._host = host
        self._roles = roles
        self._dry_run_timeout_s = dry_run_timeout_s
        self._helper = DryRunHelper()
        self._lock = asyncio.Lock()

    async def check(
        self, source: ProgramSource, settings: Mapping[str, object], roles: Roles | None = None
    ) -> ProgramFacts:
        """Try a program without deploying it. roles: of the engines in memory, instead of those that there are.

        Raises ProgramError, ``file:line: ...``.
        """
        job = DryRun(source, dict(settings), roles or self._roles(), self._dry_run_timeout_s)
        return await self._helper.dry_run(job)

    async def deploy(self, source: ProgramSource, settings: Mapping[str, object]) -> Version:
        """Put the program in charge. Raises ProgramError, ``file:line: ...``; the one in charge goes on then."""
        async with self._lock:
            try:
                await self.check(source, settings)
                program = await self._load(source, settings)
            except ProgramError as error:
                self.refused += 1
                _logger.warning("a router program was refused: %s", error.message)
                raise
            return self._host.switch(program)

    async def close(self) -> None:
        """End the helper. Idempotent."""
        await self._helper.close()

    async def _load(self, source: ProgramSource, settings: Mapping[str, object]) -> LoadedProgram:
        """On a thread: it passed in the dry run, but imports may take long, and may hang here all the same."""
        try:
            async with asyncio.timeout(self._dry_run_timeout_s):
                return await _on_thread(partial(load_source, source, settings))
        except TimeoutError:
            raise source.fault(1, "the program took too long to load") from None


async def _on_thread(load: Callable[[], LoadedProgram]) -> LoadedProgram:
    """On a thread of its own, which does not keep the process from ending (those of an executor do)."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[LoadedProgram] = loop.create_future()

    def run() -> None:
        try:
            program = load()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            loop.call_soon_threadsafe(_fail, result, error)
        else:
            loop.call_soon_threadsafe(_finish, result, program)

    threading.Thread(target=run, name="program-load", daemon=True).start()
    return await result


def _finish(result: asyncio.Future[LoadedProgram], program: LoadedProgram) -> None:
    if result.done():  # nobody waits any more
        program.unload()
    else:
        result.set_result(program)


def _fail(result: asyncio.Future[LoadedProgram], error: BaseException) -> None:
    if not result.done():
        result.set_exception(error)
