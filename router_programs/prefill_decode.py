"""Prefill/decode disaggregation: one engine computes the prompt, another one generates.

The decode engine makes room for the prompt's K/V, the prefill engine computes it and writes it there layer by layer,
and the decode engine computes the prompt's last token and goes on from it.
"""

from microserving.program import Chunks, Cluster, Program, Request


class PrefillDecode(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        prefill = cluster.prefill.least_loaded()
        decode = cluster.decode.least_loaded()
        end = request.prompt_length - 1
        received = await decode.prep_recv(request, end=end)
        await prefill.remote_send(request, to=received)
        async for chunk in decode.start_generate(request, begin=end):
            yield chunk
