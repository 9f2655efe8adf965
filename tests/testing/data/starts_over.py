"""Recovers from failures itself, and gives the beginning of the output once more."""

from dataclasses import replace

from microserving.program import Chunks, Cluster, EngineUnavailable, Program, Request


class StartsOver(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        try:
            async for chunk in cluster.all.least_loaded().start_generate(request):
                yield chunk
        except EngineUnavailable:
            again = replace(request, request_id=f"{request.request_id}-again")
            async for chunk in cluster.all.least_loaded().start_generate(again):
                yield chunk
