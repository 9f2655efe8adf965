"""Prefill/decode disaggregation in which the decode engine takes a share of the prompt.

A prefill engine that is the bottleneck gets less to do: with ``pd_balance_factor`` 0.1 the decode engine computes the
last tenth of every prompt itself. 0 is plain prefill/decode; at 1 the decode engine does everything.
"""

from microserving.program import Chunks, Cluster, Fraction, Program, Request


class BalancedPrefillDecode(Program):
    pd_balance_factor: Fraction = 0.1

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        prefill = cluster.prefill.least_loaded()
        decode = cluster.decode.least_loaded()
        end = request.split(self.pd_balance_factor)
        received = await decode.prep_recv(request, end=end)
        await prefill.remote_send(request, to=received)  # returns at once when everything was matched
        async for chunk in decode.start_generate(request, begin=end):
            yield chunk
