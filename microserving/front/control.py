"""Routes that are asked seldom: FastAPI's, with our errors and our request ids. (Hot routes: ``exchange``.)"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from microserving.errors import InvalidRequest, MicroservingError, error_body, http_status
from microserving.front.exchange import client_error, client_id, error_headers, plain_error
from microserving.front.openapi import ERROR_STATUSES
from microserving.observability import request_id_scope
from microserving.protocol.responses import ErrorAnswer, dump


class ControlRoute(APIRoute):
    """Answers every failure of its handler as the hot routes do: OpenAI's error shape, never FastAPI's own."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            request_id = uuid.uuid4().hex
            with request_id_scope(request_id):
                try:
                    response = await handle(request)
                except RequestValidationError as error:
                    response = error_response(_wrong_parameter(error))
                except Exception as error:  # noqa: BLE001 - the wall between our bugs and the client
                    response = error_response(client_error(error))
            response.headers["x-request-id"] = (
                client_id(request.headers.get("x-request-id", "")) or request_id
            )
            return response

        return answer


def _wrong_parameter(error: RequestValidationError) -> InvalidRequest:
    """Of the path or the query: bodies are read by handlers."""
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return InvalidRequest(f"{name}: {first['msg']}", param=name)


def control_router() -> APIRouter:
    """Where a front's control routes are added: ``add_api_route(path, handler, response_model=...)``."""
    return APIRouter(
        route_class=ControlRoute,
        redirect_slashes=False,
        responses={status: {"model": ErrorAnswer, "description": "An error"} for status in ERROR_STATUSES},
    )


def plain_response(
    status: int, code: str, headers: dict[str, str] | None = None, *, message: str | None = None
) -> Response:
    """An error that no exception stands for (unknown route, wrong method)."""
    return _json(plain_error(status, code, message), status, headers)


def error_response(error: MicroservingError) -> Response:
    """The answer to a request that ended with ``error``."""
    response = _json(error_body(error), http_status(error))
    response.raw_headers.extend(error_headers(error))
    return response


def _json(body: Any, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(dump(body), status_code=status, headers=headers, media_type="application/json")
