"""Keeps the prompt for later when it is cancelled: it asks an engine although nobody wants the request any more."""

import asyncio
from dataclasses import replace

from microserving.program import Chunks, Cluster, Program, Request


class ReservesWhileClosed(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        engine = cluster.decode.least_loaded()
        try:
            async for chunk in engine.start_generate(request):
                yield chunk
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            other = replace(request, request_id=f"{request.request_id}-warm")
            await engine.prep_recv(other, end=-1)
            await engine.abort(other)
            raise
