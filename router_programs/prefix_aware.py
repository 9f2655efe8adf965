"""Data parallel by cached prefix: a conversation goes on where its context is, unless that engine is too busy.

The router remembers what it sent where; with ``exact`` the engines are asked, which costs a round trip.
"""

from microserving.program import Chunks, Cluster, Program, Request


class PrefixAware(Program):
    exact: bool = False

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        if self.exact:
            engine = await cluster.all.prefix_aware_exact(request)
        else:
            engine = cluster.all.prefix_aware(request)
        async for chunk in engine.start_generate(request):
            yield chunk
