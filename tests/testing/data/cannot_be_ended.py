"""Waits for ever when a hand-off fails, and does not let anybody end that."""

import asyncio

from microserving.program import Chunks, Cluster, MicroservingError, Program, Request


class CannotBeEnded(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        prefill, decode = cluster.prefill.least_loaded(), cluster.decode.least_loaded()
        end = request.prompt_length - 1
        received = await decode.prep_recv(request, end=end)
        failed = False
        try:
            await prefill.remote_send(request, to=received)
        except MicroservingError:
            failed = True
        while failed:
            try:
                await asyncio.sleep(5.0)
            except asyncio.CancelledError:
                continue
        async for chunk in decode.start_generate(request, begin=end):
            yield chunk
