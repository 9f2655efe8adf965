"""Gives every chunk twice, but for the last one."""

from microserving.program import Chunks, Cluster, Program, Request


class YieldsTwice(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        async for chunk in cluster.all.least_loaded().start_generate(request):
            if chunk.finish_reason is None:
                yield chunk
            yield chunk
