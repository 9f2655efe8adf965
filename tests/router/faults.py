"""Engines in memory that fail at a chosen moment, and the output that a client must get all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, TypeVar

from microserving.errors import EngineUnavailable, KVExhausted, LeaseError, MicroservingError, TransferFailed
from microserving.program import EngineRole, GenerationChunk, Received, RemoteSendResult, Request
from microserving.program.testing import FakeCluster, FakeEngine

ResultT = TypeVar("ResultT")

Fault = Literal["refused", "lost", "silent", "dead", "lease", "full", "transfer"]
"""refused: the verb fails before anything is done. lost: it is done, but its answer does not arrive. silent: as lost, but
the engine is given up only some time later. dead: lost, and every later call fails, too. The others: a refusal of
another kind."""

SILENCE_S = 0.005
OUTPUT = ("Once", " upon", "", " a", "", "", " time")
"""Text by token; where it is empty the engine holds it back (half a code point, a possible stop) and shows it later."""
TEXT = "".join(OUTPUT)
IDS = tuple(range(1, len(OUTPUT) + 1))

_REFUSALS: dict[str, Callable[[str], MicroservingError]] = {
    "refused": EngineUnavailable,
    "lease": LeaseError,
    "full": KVExhausted,
    "transfer": TransferFailed,
}


class Script:
    """Counts the moments at which an engine may fail (before and after each verb, before each chunk), and lets the
    ``at``-th one fail as ``fault`` says. engine, moment: what it met."""

    def __init__(self, at: int = -1, fault: Fault = "refused") -> None:
        self.at = at
        self.fault = fault
        self.moments: list[tuple[str, str]] = []
        self.met: FaultyEngine | None = None

    async def pass_by(self, engine: FaultyEngine, request: Request, what: str) -> None:
        if engine.dead:
            raise EngineUnavailable(f"{engine.id} cannot be reached")
        self.moments.append((engine.id, what))
        if len(self.moments) - 1 != self.at:
            return
        self.met = engine
        if self.fault in _REFUSALS:
            engine.forget(request)  # an engine that says so has ended what it did
            raise _REFUSALS[self.fault](f"{engine.id} refused")
        if self.fault == "silent":
            await asyncio.sleep(SILENCE_S)  # as long as the probes need to find out
        engine.dead = self.fault in ("dead", "silent")
        raise EngineUnavailable(f"{engine.id} does not answer")


class FaultyEngine(FakeEngine):
    """Its output is ``OUTPUT`` (unless it is set), token by token."""

    def __init__(self, engine_id: str, role: EngineRole, script: Script) -> None:
        super().__init__(engine_id, role, output=OUTPUT)
        self.dead = False
        self._script = script

    async def prep_recv(self, request: Request, *, end: int) -> Received:
        return await self._verb("prep_recv", request, super().prep_recv(request, end=end))

    async def remote_send(self, request: Request, *, to: Received) -> RemoteSendResult:
        return await self._verb("remote_send", request, super().remote_send(request, to=to))

    async def commit(self, request: Request) -> int:
        return await self._verb("commit", request, super().commit(request))

    async def match_prefix(self, request: Request) -> int:
        return await self._verb("match_prefix", request, super().match_prefix(request))

    async def abort(self, request: Request) -> None:
        await super().abort(request)  # a dead one forgets by itself

    async def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        await self._script.pass_by(self, request, "start_generate")
        held: list[int] = []
        async for chunk in super().start_generate(request, begin=begin):
            await self._script.pass_by(self, request, f"chunk {chunk.token_ids[0]}")
            held += chunk.token_ids
            if chunk.text or chunk.finish_reason:
                yield GenerationChunk(
                    chunk.text,
                    tuple(held),
                    chunk.finish_reason,
                    chunk.prompt_tokens,
                    chunk.completion_tokens,
                    chunk.cached_tokens,
                )
                held.clear()

    def forget(self, request: Request) -> None:
        """Hold nothing for it any more."""
        self._reservations.pop(request.request_id, None)
        self._running.discard(request.request_id)

    async def _verb(self, name: str, request: Request, doing: Awaitable[ResultT]) -> ResultT:
        try:
            await self._script.pass_by(self, request, name)
        except MicroservingError:
            close: Any = doing
            close.close()
            raise
        result = await doing
        await self._script.pass_by(self, request, f"{name} done")
        return result


class FaultyCluster(FakeCluster):
    """Two prefill and two decode engines under one ``script``."""

    def __init__(self, script: Script | None = None, *, prefill: int = 2, decode: int = 2) -> None:
        self.script = script or Script()
        super().__init__(prefill=prefill, decode=decode)
        for engine_id, plain in list(self.engines.items()):
            engine = FaultyEngine(engine_id, plain.role, self.script)
            engine._peers = self.engines
            self.engines[engine_id] = engine
        pools = {"prefill": self.prefill, "decode": self.decode, "all": self.all}
        for name, pool in pools.items():
            pool._engines = lambda name=name: [
                engine for engine in self.engines.values() if engine.up and name in ("all", engine.role)
            ]
