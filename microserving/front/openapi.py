"""The hot routes in the OpenAPI document. They are plain ASGI handlers, so FastAPI does not know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from microserving.errors import HTTP_STATUS
from microserving.front.exchange import Handler
from microserving.protocol.responses import ErrorAnswer

ERROR_STATUSES: Final = tuple(sorted({*HTTP_STATUS.values(), 500}))
"""Every status of an error that a route may answer with."""
_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class HotRoute:
    """POST ``path``. summary, request, answer: for the document; the handler parses and answers by itself.

    answer None: OpenAI's completion or chunks, as the request asks.
    """

    path: str
    handler: Handler
    summary: str
    request: type[BaseModel]
    answer: type[BaseModel] | None = None


def add_hot_routes(document: dict[str, Any], routes: Sequence[HotRoute]) -> None:
    """Write ``routes`` and the schemas of their bodies into an OpenAPI ``document``."""
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [(ErrorAnswer, "serialization")]
    wanted += [(route.request, "validation") for route in routes]
    wanted += [(route.answer, "serialization") for route in routes if route.answer is not None]
    refs, definitions = models_json_schema(list(dict.fromkeys(wanted)), ref_template=_REF)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions.get("$defs", {}))
    error = {"description": "An error", "content": _json(refs[ErrorAnswer, "serialization"])}
    errors = {str(status): error for status in ERROR_STATUSES}
    for route in routes:
        answer = {"type": "object"} if route.answer is None else refs[route.answer, "serialization"]
        content = _json(answer)
        if route.answer is None:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        document["paths"][route.path] = {
            "post": {
                "summary": route.summary,
                "operationId": route.path.strip("/").replace("/", "_"),
                "requestBody": {"required": True, "content": _json(refs[route.request, "validation"])},
                "responses": {"200": {"description": "Done", "content": content}, **errors},
            }
        }


def drop_validation_errors(document: dict[str, Any]) -> None:
    """Without what FastAPI promises of its own accord: a 422 with errors in its own shape, which no route answers."""
    for item in document["paths"].values():
        for operation in item.values():
            operation["responses"].pop("422", None)
    schemas = document.get("components", {}).get("schemas", {})
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
