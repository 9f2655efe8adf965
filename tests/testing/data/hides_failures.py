"""Ends the stream when its engine fails, as if all had been said."""

from microserving.program import Chunks, Cluster, GenerationChunk, MicroservingError, Program, Request


class HidesFailures(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        try:
            async for chunk in cluster.all.least_loaded().start_generate(request):
                yield chunk
        except MicroservingError:
            yield GenerationChunk("", finish_reason="stop")
