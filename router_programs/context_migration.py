"""Data parallel in which a conversation's context follows it: it is moved, not computed again.

The least loaded engine generates. When another one has at least ``min_tokens`` more of the prompt in its cache, it sends
what it has, and computes the rest of the prompt on the way; the receiver commits that to its own cache, so that the next
turns are hits there too. The engine that has the context keeps the request while it is at most ``slack`` requests busier.
"""

from microserving.program import Chunks, Cluster, Program, Request


class ContextMigration(Program):
    min_tokens: int = 64
    slack: int = 1

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        matched = await cluster.all.matched(request)
        source = max(matched, key=lambda engine: (matched[engine], -engine.in_flight))
        has_context = matched[source] >= self.min_tokens
        if has_context and source.in_flight <= min(engine.in_flight for engine in matched) + self.slack:
            target = source
        else:
            target = cluster.all.least_loaded()
        if matched[source] - matched.get(target, 0) >= self.min_tokens:
            received = await target.prep_recv(request, end=request.prompt_length)
            await source.remote_send(request, to=received)
            await target.commit(request)
        async for chunk in target.start_generate(request):
            yield chunk
