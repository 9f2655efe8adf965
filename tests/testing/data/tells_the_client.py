"""Turns every failure of an engine into one that nobody tries again."""

from microserving.program import Chunks, Cluster, EngineUnavailable, Program, Request


class TellsTheClient(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        engine = cluster.all.least_loaded()
        try:
            async for chunk in engine.start_generate(request):
                yield chunk
        except EngineUnavailable as error:
            raise RuntimeError(f"no answer from {engine.id}") from error
