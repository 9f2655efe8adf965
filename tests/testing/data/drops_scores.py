"""Makes chunks of its own, and forgets the log-probabilities."""

from microserving.program import Chunks, Cluster, GenerationChunk, Program, Request


class DropsScores(Program):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        async for chunk in cluster.all.round_robin().start_generate(request):
            yield GenerationChunk(
                chunk.text,
                chunk.token_ids,
                chunk.finish_reason,
                chunk.prompt_tokens,
                chunk.completion_tokens,
                chunk.cached_tokens,
            )
