"""Tries again and again by itself."""

from microserving.program import Chunks, Cluster, KVExhausted, Program, Request


class RetriesForEver(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        while True:
            prefill, decode = cluster.prefill.least_loaded(), cluster.decode.least_loaded()
            try:
                received = await decode.prep_recv(request, end=-1)
                break
            except KVExhausted:
                continue
        await prefill.remote_send(request, to=received)
        async for chunk in decode.start_generate(request, begin=received.end):
            yield chunk
