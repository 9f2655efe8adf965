"""Reserves in a task of its own, and for an id of its own: when the request ends early, that comes after the clean-up."""

import asyncio
from dataclasses import replace

from microserving.program import Chunks, Cluster, Program, Request


class ReservesInBackground(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        engine = cluster.decode.least_loaded()
        self._warming = asyncio.create_task(self._warm(request, cluster))
        async for chunk in engine.start_generate(request):
            yield chunk

    async def _warm(self, request: Request, cluster: Cluster) -> None:
        await asyncio.sleep(0.05)
        other = replace(request, request_id=f"{request.request_id}-warm")
        engine = cluster.decode.least_loaded()
        await engine.prep_recv(other, end=-1)
        await asyncio.sleep(0.05)
        await engine.abort(other)
