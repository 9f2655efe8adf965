"""Prefill/decode disaggregation in which the decode engine takes a share of the prompt.

A prefill engine that is the bottleneck gets less to do: with ``pd_balance_factor`` 0.1 the decode engine computes the
last tenth of every prompt itself. 0 is plain prefill/decode; at 1 the decode engine does everything. ``auto`` takes the share
with which requests take the least time in the mean, by how often they come, their lengths and the engines' measured rates:
more the more there are, and as a rule none while nobody waits; when most of a prompt is cached, the prefill engine is left out.
"""

from typing import Literal

from microserving.program import Chunks, Cluster, Fraction, Program, Request


class BalancedPrefillDecode(Program):
    pd_balance_factor: Fraction | Literal["auto"] = 0.1

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        prefill = cluster.prefill.least_loaded()
        decode = cluster.decode.least_loaded()
        begin = 0
        if self.pd_balance_factor == "auto":
            matched = await decode.match_prefix(request)
            end = cluster.balanced_end(request, matched, prefill, decode)
        else:
            matched, end = 0, request.split(self.pd_balance_factor)
        if end > matched:
            received = await decode.prep_recv(request, end=end)
            await prefill.remote_send(request, to=received)  # returns at once when everything was matched
            begin = end
        async for chunk in decode.start_generate(request, begin=begin):
            yield chunk
