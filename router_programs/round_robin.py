"""Data parallel: every engine serves whole requests, one after the other."""

from microserving.program import Chunks, Cluster, Program, Request


class RoundRobin(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        engine = cluster.all.round_robin()
        async for chunk in engine.start_generate(request):
            yield chunk
