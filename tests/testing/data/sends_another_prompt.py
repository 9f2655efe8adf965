"""Lets the prefill engine compute another prompt, so that the K/V is not this one's."""

from dataclasses import replace

from microserving.program import Chunks, Cluster, Program, Request


class SendsAnotherPrompt(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        prefill, decode = cluster.prefill.least_loaded(), cluster.decode.least_loaded()
        end = request.prompt_length - 1
        received = await decode.prep_recv(request, end=end)
        other = replace(request, prompt_token_ids=tuple(reversed(request.prompt_token_ids)))
        await prefill.remote_send(other, to=received)
        async for chunk in decode.start_generate(request, begin=end):
            yield chunk
