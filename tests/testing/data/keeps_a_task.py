"""Leaves a task behind that nobody waits for."""

import asyncio

from microserving.program import Chunks, Cluster, Program, Request


class KeepsATask(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        engine = cluster.all.least_loaded()
        self._ticking = asyncio.create_task(self._tick())
        async for chunk in engine.start_generate(request):
            yield chunk

    async def _tick(self) -> None:
        while True:  # noqa: ASYNC110 - as wrong as the rest
            await asyncio.sleep(1.0)
