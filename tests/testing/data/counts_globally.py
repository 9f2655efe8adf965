"""Counts what runs by itself, and forgets to count down when something fails."""

from microserving.program import Chunks, Cluster, Program, Request

RUNNING: dict[str, int] = {}


class CountsGlobally(Program):
    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self._running = 0

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        engine = min(cluster.all, key=lambda each: RUNNING.get(each.id, 0))
        RUNNING[engine.id] = RUNNING.get(engine.id, 0) + 1
        self._running += 1
        async for chunk in engine.start_generate(request):
            yield chunk
        RUNNING[engine.id] -= 1
        self._running -= 1
