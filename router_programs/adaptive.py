"""Follows the traffic: whole requests, or prompts and outputs apart with as many engines for each as latencies ask for.

It begins with whole requests, until the time between tokens misses its objective (or at once: ``apart``). ``ttft_ms``
bounds the time to the first token, ``itl_ms`` the time between tokens, both at quantile ``quantile``. A side that misses
its objective gets an engine from the other one, if that keeps its own well enough; no side gives its last one away. When
the prompts' side is short of engines and there is none to get, everything is served whole again.
"""

import asyncio

from microserving.policies import ObjectiveWatch
from microserving.program import Chunks, Cluster, Fraction, Program, Request


class Adaptive(Program):
    ttft_ms: float = 2000.0
    itl_ms: float = 100.0
    quantile: Fraction = 0.9
    interval_s: float = 5.0
    apart: bool = False

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        if not self.apart:
            async for chunk in cluster.all.prefix_aware(request).start_generate(request):
                yield chunk
            return
        prefill, decode = cluster.prefill.prompt_length(request), cluster.decode.prefix_aware(request)
        end = 0 if prefill.id == decode.id else request.prompt_length - 1  # one engine may be in both pools
        if end > 0:
            received = await decode.prep_recv(request, end=end)
            await prefill.remote_send(request, to=received)
        async for chunk in decode.start_generate(request, begin=end):
            yield chunk

    async def plan(self, cluster: Cluster) -> None:
        watch = ObjectiveWatch(self.ttft_ms / 1000, self.itl_ms / 1000)
        while True:
            await asyncio.sleep(self.interval_s)
            measured = cluster.metrics.all
            shift = watch.decide(measured.ttft.quantile(self.quantile), measured.itl.quantile(self.quantile))
            if shift is not None:
                await self._shift(cluster, shift)
                cluster.metrics.clear()  # what was measured before says nothing of what comes

    async def _shift(self, cluster: Cluster, shift: str) -> None:
        if not self.apart:
            self.apart = shift == "decode" and min(len(cluster.prefill), len(cluster.decode)) > 0
            return
        giving = cluster.decode if shift == "prefill" else cluster.prefill
        if len(giving) > 1:
            await cluster.set_role(giving.least_loaded(), "prefill" if shift == "prefill" else "decode")
        elif shift == "prefill":
            self.apart = False
