"""The engine's HTTP app: the OpenAI front over the engine itself, and the verbs."""

from __future__ import annotations

from starlette.applications import Starlette

from microserving.front import FrontSettings, create_front
from microserving.server.backend import EngineBackend
from microserving.server.services import EngineServices
from microserving.server.verbs import Verbs


def create_app(services: EngineServices, settings: FrontSettings | None = None) -> Starlette:
    """An ASGI app over a started engine. The caller starts and stops what is in ``services``."""
    settings = settings or FrontSettings()
    return create_front(
        EngineBackend(services),
        settings,
        extra_routes=Verbs(services, settings).routes(),
        alive=lambda: services.engine.healthy,
    )
