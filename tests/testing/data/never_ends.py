"""Waits for an event that never comes when a hand-off fails."""

import asyncio

from microserving.program import Chunks, Cluster, MicroservingError, Program, Request


class NeverEnds(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        prefill, decode = cluster.prefill.least_loaded(), cluster.decode.least_loaded()
        end = request.prompt_length - 1
        received = await decode.prep_recv(request, end=end)
        try:
            await prefill.remote_send(request, to=received)
        except MicroservingError:
            await asyncio.Event().wait()
        async for chunk in decode.start_generate(request, begin=end):
            yield chunk
