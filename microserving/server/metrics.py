"""GET `/metrics` of an engine: what it counts and measures, in Prometheus' text format.

Owns which figure of the engine is which metric. The names are ``observability.metrics``'.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

import microserving
from microserving.engine.jobs import Counters, LoadSnapshot
from microserving.engine.statistics import Timings
from microserving.observability import metrics as names
from microserving.observability.metrics import CONTENT_TYPE, Exposition, Figures
from microserving.protocol.microserving import EngineInfo
from microserving.server.services import EngineServices


class EngineMetrics:
    """The handler. Everything is read at the time of the scrape."""

    def __init__(self, services: EngineServices) -> None:
        self._services = services
        self._exposition = Exposition(self.figures)

    def add_to(self, router: APIRouter) -> None:
        router.add_api_route("/metrics", self.metrics, response_class=PlainTextResponse)

    async def metrics(self) -> Response:
        """Prometheus metrics."""
        return Response(self._exposition.text(), headers={"content-type": CONTENT_TYPE})

    def figures(self) -> Figures:
        figures, engine = Figures(), self._services.engine
        _put_build(figures, self._services.info)
        load = engine.load()
        _put_load(figures, load)
        _put_counters(figures, load.counters)
        _put_timings(figures, engine.timings())
        return figures


def _put_build(figures: Figures, info: EngineInfo) -> None:
    figures.put(
        names.BUILD_INFO,
        {
            "version": microserving.__version__,
            "process": "engine",
            "engine_id": info.engine_id,
            "node_role": info.node_role,
            "model": info.model,
        },
    )


def _put_load(figures: Figures, load: LoadSnapshot) -> None:
    pages = {
        "free": load.free_pages,
        "cached": load.cached_pages,
        "running": load.running_pages,
        "reserved": load.reserved_pages,
        "quarantined": load.quarantined_pages,
    }
    figures.put_all(names.KV_PAGES, pages)
    figures.put(names.KV_PAGES_PINNED, load.pinned_pages)
    figures.put(names.RUNNING, load.running)
    figures.put(names.WAITING, load.waiting)
    figures.put_all(names.LEASES, load.leases)
    figures.put(names.QUEUED_PREFILL_TOKENS, load.queued_prefill_tokens)


def _put_counters(figures: Figures, counters: Counters) -> None:
    for metric, value in (
        (names.PROMPT_TOKENS, counters.prompt_tokens_computed),
        (names.RECOMPUTED_TOKENS, counters.recomputed_tokens),
        (names.OUTPUT_TOKENS, counters.output_tokens),
        (names.TOKENS_SENT, counters.tokens_sent),
        (names.BYTES_SENT, counters.bytes_sent),
        (names.TOKENS_RECEIVED, counters.tokens_received),
        (names.PREFIX_QUERY_TOKENS, counters.prefix_query_tokens),
        (names.PREFIX_HIT_TOKENS, counters.prefix_hit_tokens),
        (names.EVICTED_PAGES, counters.evicted_pages),
        (names.PREEMPTIONS, counters.preemptions),
        (names.ABORTS, counters.aborts),
        (names.LEASES_EXPIRED, counters.leases_expired),
    ):
        figures.put(metric, value)
    figures.put_all(names.FINISHED, counters.requests_finished)


def _put_timings(figures: Figures, timings: Timings) -> None:
    for kind, histogram in timings.steps.items():
        figures.put(names.STEP_SECONDS, histogram, kind)
    figures.put(names.TTFT_SECONDS, timings.ttft)
    figures.put(names.ITL_SECONDS, timings.itl)
