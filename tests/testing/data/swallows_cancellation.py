"""Takes its cancellation for a failure of the engine, and goes on elsewhere."""

import asyncio

from microserving.program import Chunks, Cluster, Program, Request


class SwallowsCancellation(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        engine = cluster.all.round_robin()
        try:
            await engine.match_prefix(request)
        except asyncio.CancelledError:
            engine = cluster.all.round_robin()
        async for chunk in engine.start_generate(request):
            yield chunk
