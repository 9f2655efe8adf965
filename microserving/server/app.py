"""The engine's HTTP app: the OpenAI front over the engine itself, and the verbs."""

from __future__ import annotations

import logging

from fastapi import FastAPI

from microserving.front import FrontSettings, create_front
from microserving.server.backend import EngineBackend
from microserving.server.metrics import EngineMetrics
from microserving.server.services import EngineServices
from microserving.server.status import EngineStatus
from microserving.server.verbs import Verbs

_logger = logging.getLogger(__name__)


def create_app(services: EngineServices, settings: FrontSettings | None = None) -> FastAPI:
    """An ASGI app over a started engine. The caller starts and stops what is in ``services``."""
    settings = settings or FrontSettings()
    if services.tokenizer.chat_unavailable is not None:
        _logger.warning("/v1/chat/completions is off: %s", services.tokenizer.chat_unavailable)
    control = EngineStatus(services).router()
    EngineMetrics(services).add_to(control)
    return create_front(
        EngineBackend(services),
        settings,
        title="microserving engine",
        hot_routes=Verbs(services, settings).routes(),
        control=control,
        alive=lambda: services.engine.healthy,
    )
