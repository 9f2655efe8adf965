"""The app factory: OpenAI's routes over one backend, plus whatever routes the caller brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Lifespan

from microserving.errors import EngineUnavailable
from microserving.front.backend import Backend
from microserving.front.exchange import Exchange, Handler, plain_error, route
from microserving.front.openai_api import OpenAIFront
from microserving.front.settings import FrontSettings
from microserving.protocol.responses import dump


def create_front(
    backend: Backend,
    settings: FrontSettings | None = None,
    *,
    extra_routes: Sequence[BaseRoute] = (),
    lifespan: Lifespan[Starlette] | None = None,
    alive: Callable[[], bool] | None = None,
) -> Starlette:
    """An ASGI app. extra_routes: made with ``route``. alive: what `/health` tells (default: always, as it answers)."""
    settings = settings or FrontSettings()
    front = OpenAIFront(backend, settings)
    routes: list[BaseRoute] = [
        route("POST", "/v1/completions", front.completions, settings),
        route("POST", "/v1/chat/completions", front.chat_completions, settings),
        route("GET", "/v1/models", front.models, settings),
        route("GET", "/v1/models/{model_id:path}", front.model, settings),
        route("GET", "/health", _health(alive), settings),
        route("GET", "/ready", front.ready, settings),
        *extra_routes,
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={404: _unknown_route, 405: _wrong_method},
    )
    app.router.redirect_slashes = False
    return app


def _health(alive: Callable[[], bool] | None) -> Handler:
    async def health(exchange: Exchange) -> None:
        if alive is not None and not alive():
            raise EngineUnavailable("the engine has failed")
        await exchange.reply_json({"status": "ok"})

    return health


def _unknown_route(_: Request, __: Exception) -> Response:
    return _plain(404, "unknown_url")


def _wrong_method(_: Request, error: Exception) -> Response:
    return _plain(405, "method_not_allowed", getattr(error, "headers", None))


def _plain(status: int, code: str, headers: dict[str, str] | None = None) -> Response:
    return Response(
        dump(plain_error(status, code)), status_code=status, headers=headers, media_type="application/json"
    )
