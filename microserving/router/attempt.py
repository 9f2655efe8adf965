"""One run of the program for one request, held to the rules.

Owns the run from its first step to its clean-up. Does not know where engines come from or whether there is another
attempt after it.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncGenerator

from microserving.errors import InternalError, MicroservingError, Preempted, StartupError
from microserving.program import Cluster, GenerationChunk, Request
from microserving.router.engine_client import InFlight
from microserving.router.holdings import Holdings, close, close_within
from microserving.router.program_loader import LoadedProgram

_logger = logging.getLogger(__name__)


class Attempt:
    """Iterate once over ``chunks``; then, however that ended, ``end`` it, and ``release`` what that left over."""

    def __init__(
        self, program: LoadedProgram, request: Request, cluster: Cluster, in_flight: InFlight
    ) -> None:
        self._program = program
        self._request = request
        self._holdings = Holdings(in_flight)
        self._cluster = cluster.bound(seen=self._holdings.bind, chosen=self._holdings.choose)
        self._running = False
        self.chunks = self._run()

    def end(self) -> bool:
        """No more chunks are wanted. False: there is something to ``release``."""
        self._holdings.unclaim()
        return not self._running and not self._holdings

    async def release(self, timeout_s: float) -> None:
        """Stop the program where it is and give back all that the attempt holds on engines."""
        await close_within(self.chunks, timeout_s)
        self._holdings.unclaim()
        await self._holdings.release(timeout_s)

    async def _run(self) -> AsyncGenerator[GenerationChunk, None]:
        """The program's chunks. Raises: what the program let pass of ``errors``, InternalError for its bugs."""
        self._running = True
        try:
            route = self._program.instance.route(self._request, self._cluster)
            finished = False
            try:
                async for chunk in route:
                    if finished:
                        raise self._bug("went on after the last chunk")
                    finished = self._is_last(chunk)
                    yield chunk
            finally:
                await close(route)
            if not finished:
                raise self._bug("ended without a last chunk (one with a finish_reason)")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self._bug("was cancelled from within") from None
        except StartupError as error:
            raise self._failed(error) from error
        except MicroservingError:
            raise
        except Exception as error:  # the wall: a program may raise anything
            raise self._failed(error) from error
        finally:
            self._running = False

    def _is_last(self, chunk: object) -> bool:
        if not isinstance(chunk, GenerationChunk):
            raise self._bug(f"yielded a {type(chunk).__name__} instead of a GenerationChunk")
        if chunk.finish_reason == "preempt":
            raise Preempted("the generation was given back by its engine", retry_after_s=1.0)
        return chunk.finish_reason is not None

    def _failed(self, error: Exception) -> InternalError:
        where = self._program.locate(traceback.extract_tb(error.__traceback__))
        _logger.error("the router program failed at %s: %r", where, error)
        return InternalError("the router program failed; the server's log has the details")

    def _bug(self, what: str) -> InternalError:
        _logger.error("the router program %s %s", self._program.where, what)
        return InternalError(f"the router program {what}")
