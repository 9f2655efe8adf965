"""The app factory: OpenAI's routes over one backend, plus whatever routes the caller brings.

A FastAPI app (`/docs`, `/openapi.json`) around hot routes that it does not touch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Lifespan, Message, Receive, Scope, Send

import microserving
from microserving.errors import EngineUnavailable, Unauthorized
from microserving.front.access import OPEN_PATHS, Access
from microserving.front.backend import Backend, ServedModel
from microserving.front.channel import Header
from microserving.front.chat import ChatFront
from microserving.front.control import control_router, error_response, plain_response
from microserving.front.cors import Cors
from microserving.front.exchange import Endpoint
from microserving.front.models import ModelsFront
from microserving.front.openai_api import OpenAIFront
from microserving.front.openapi import HotRoute, add_hot_routes, drop_validation_errors
from microserving.front.responses_api import ResponsesFront
from microserving.front.settings import BodyLimits, FrontSettings
from microserving.front.tokenize import TokenizeFront
from microserving.protocol.chat import ChatCompletionRequest
from microserving.protocol.openai import CompletionRequest
from microserving.protocol.responses import ModelCard, ModelList, Status
from microserving.protocol.responses_api.request import ResponsesRequest
from microserving.protocol.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from microserving.tokenizer import Tokenizer


class FrontApp(FastAPI):
    """Hot routes are answered before FastAPI's middlewares and router: each is an ``Endpoint`` found by its path."""

    def __init__(
        self,
        title: str,
        hot_routes: Sequence[HotRoute],
        settings: FrontSettings,
        limits: Callable[[], BodyLimits],
        **options: Any,
    ) -> None:
        """limits: of a body that comes now. options: of FastAPI."""
        super().__init__(
            title=title,
            version=microserving.__version__,
            redoc_url=None,
            swagger_ui_oauth2_redirect_url=None,
            redirect_slashes=False,
            exception_handlers={404: _unknown_route, 405: _wrong_method},
            **options,
        )
        self._hot_routes = tuple(hot_routes)
        self._access = Access(settings.api_keys, settings.client_limits)
        self._cors = Cors(settings.cors_origins)
        self._endpoints = {
            route.path: Endpoint(route.handler, settings, limits, self._access, self._cors)
            for route in hot_routes
        }
        self.endpoints = {path.encode("ascii"): endpoint for path, endpoint in self._endpoints.items()}
        """For a server that can do without ASGI (``http_protocol``)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            preflight = self._cors.preflight(scope["method"], scope["headers"])
            if preflight is not None:
                await preflight(scope, receive, send)
                return
            endpoint = self._endpoints.get(scope["path"])
            if endpoint is not None and scope["method"] == "POST":
                await endpoint(scope, receive, send)
                return
            if self._cors:
                send = _with_headers(send, self._cors.headers(scope["headers"]))
            if scope["path"] not in OPEN_PATHS and (denied := self._denied(scope)) is not None:
                await denied(scope, receive, send)
                return
            if endpoint is not None:
                refusal = plain_response(405, "method_not_allowed", {"allow": "POST"})
                await refusal(scope, receive, send)
                return
            if scope["method"] == "HEAD":  # FastAPI's routes do not take it; the server sends no body
                scope = {**scope, "method": "GET"}
        await super().__call__(scope, receive, send)

    def _denied(self, scope: Scope) -> Response | None:
        """What somebody gets who may not ask."""
        client = scope.get("client")
        try:
            self._access.identify(scope["headers"], client[0] if client else "")
        except Unauthorized as error:
            return error_response(error)
        return None

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            document = get_openapi(title=self.title, version=self.version, routes=self.routes)
            drop_validation_errors(document)
            add_hot_routes(document, self._hot_routes)
            self.openapi_schema = document
        return self.openapi_schema


def create_front(
    backend: Backend,
    settings: FrontSettings | None = None,
    *,
    title: str = "microserving",
    hot_routes: Sequence[HotRoute] = (),
    control: APIRouter | None = None,
    lifespan: Lifespan[FastAPI] | None = None,
    alive: Callable[[], bool] | None = None,
    check_ready: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """An ASGI app. hot_routes, control (a ``control_router``): what the caller serves beside `/v1`.

    alive: what `/health` tells (default: always, as it answers). check_ready: raises the error that `/ready` answers with
    although the backend is ready.
    """
    settings = settings or FrontSettings()
    front = OpenAIFront(backend, settings)
    chat = ChatFront(front)
    responses = ResponsesFront(chat, strict=settings.strict_fields)
    own = [
        HotRoute("/v1/completions", front.completions, "Continue prompts", CompletionRequest),
        HotRoute("/v1/chat/completions", chat.chat_completions, "Answer a chat", ChatCompletionRequest),
        HotRoute("/v1/responses", responses.responses, "Answer a chat, stored nowhere", ResponsesRequest),
    ]
    models = ModelsFront(backend, check_ready)
    texts = TokenizeFront(models, strict=settings.strict_fields)
    own += [
        HotRoute(
            "/tokenize", texts.tokenize, "The tokens of a text or a chat", TokenizeRequest, TokenizeAnswer
        ),
        HotRoute("/detokenize", texts.detokenize, "The text of tokens", DetokenizeRequest, DetokenizeAnswer),
    ]
    app = FrontApp(title, [*own, *hot_routes], settings, _limits_of(backend, settings), lifespan=lifespan)
    router = control_router()
    router.add_api_route("/v1/models", models.models, response_model=ModelList)
    router.add_api_route("/v1/models/{model_id:path}", models.model, response_model=ModelCard)
    router.add_api_route("/health", _health(alive), response_model=Status)
    router.add_api_route("/ready", models.ready, response_model=Status)
    app.include_router(router)
    if control is not None:
        app.include_router(control)
    return app


def _with_headers(send: Send, headers: Sequence[Header]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return sending


def _limits_of(backend: Backend, settings: FrontSettings) -> Callable[[], BodyLimits]:
    known: tuple[ServedModel | None, Tokenizer | None] = None, None
    derived = settings.body_limits(0, None)

    def limits() -> BodyLimits:
        nonlocal known, derived
        model, tokenizer = backend.model, backend.tokenizer
        if model is not known[0] or tokenizer is not known[1]:
            known = model, tokenizer
            derived = settings.body_limits(
                0 if model is None else model.max_context,
                None if tokenizer is None else tokenizer.text_bytes_per_token,
            )
        return derived

    return limits


def _health(alive: Callable[[], bool] | None) -> Callable[[], Any]:
    async def health() -> Status:
        """Whether the process works."""
        if alive is not None and not alive():
            raise EngineUnavailable("the engine has failed")
        return Status(status="ok")

    return health


async def _unknown_route(_: Request, __: Exception) -> Response:
    message = "there is nothing at this path: the OpenAI API is under /v1, and /docs shows every route"
    return plain_response(404, "unknown_url", message=message)


async def _wrong_method(_: Request, error: Exception) -> Response:
    return plain_response(405, "method_not_allowed", getattr(error, "headers", None))
