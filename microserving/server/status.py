"""What an engine tells of itself: GET `/microserving/info`, `/load` and `/tokenizer`."""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property

from fastapi import APIRouter
from starlette.responses import Response

from microserving.engine.jobs import LoadSnapshot
from microserving.front import control_router
from microserving.protocol.microserving import EngineInfo, EngineLoad, TokenizerDocument
from microserving.protocol.responses import dump
from microserving.server.services import EngineServices


class EngineStatus:
    """The handlers. Holds no state of requests."""

    def __init__(self, services: EngineServices) -> None:
        self._services = services

    def router(self) -> APIRouter:
        router = control_router()
        router.add_api_route("/microserving/info", self.info, response_model=EngineInfo)
        router.add_api_route("/microserving/load", self.load, response_model=EngineLoad)
        router.add_api_route("/microserving/tokenizer", self.tokenizer, response_model=TokenizerDocument)
        return router

    async def info(self) -> EngineInfo:
        """What the engine is."""
        return self._services.info

    async def load(self) -> EngineLoad:
        """What the engine has to do now, and its cumulative counters."""
        return engine_load(self._services.engine.load())

    async def tokenizer(self) -> Response:
        """The model's tokenizer, for routers."""
        return Response(self._tokenizer_body, media_type="application/json")

    @cached_property
    def _tokenizer_body(self) -> bytes:
        """Some megabytes; encoded once, when a router first asks."""
        return dump(self._services.tokenizer.to_dict())


def engine_load(load: LoadSnapshot) -> EngineLoad:
    """``load`` as the wire has it."""
    return EngineLoad.model_validate(asdict(load))
