"""The admin routes of engines: which there are, and membership, draining and roles at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from microserving.errors import ConfigError, InvalidRequest
from microserving.front import control_router
from microserving.program import EngineRole
from microserving.protocol.body import WireModel
from microserving.router.admin import read_body
from microserving.router.engine_registry import EngineRegistry, Peer, Status

_ONE = "/admin/engines/{engine:path}"


class AddRequest(WireModel):
    url: str = Field(min_length=1, max_length=2048)
    role: EngineRole = "hybrid"


class RoleRequest(WireModel):
    role: EngineRole


class EngineState(BaseModel):
    """id: None until it was reached. reason: why it is not up. in_flight: the requests that this router has on it."""

    id: str | None
    url: str
    role: EngineRole
    state: Status
    reason: str
    in_flight: int


class EngineList(BaseModel):
    engines: list[EngineState]


class EngineAdmin:
    """The handlers of `/admin/engines...`. Each answers with all engines as they are then. {engine}: node id or URL."""

    def __init__(self, registry: EngineRegistry) -> None:
        self._registry = registry

    def router(self) -> APIRouter:
        router = control_router()
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            ("GET", "/admin/engines", self.engines),
            ("POST", "/admin/engines", self.add),
            ("POST", f"{_ONE}/drain", self.drain),
            ("POST", f"{_ONE}/undrain", self.undrain),
            ("DELETE", _ONE, self.remove),
            ("PATCH", _ONE, self.set_role),
        ]
        for method, path, handler in routes:
            router.add_api_route(path, handler, methods=[method], response_model=EngineList)
        return router

    async def engines(self) -> EngineList:
        """All engines."""
        return EngineList(engines=[_state(peer) for peer in self._registry.peers])

    async def add(self, request: Request) -> EngineList:
        """Use one more engine, from its first good answer on."""
        body = await read_body(request, AddRequest)
        with _refusals("url"):
            self._registry.add(body.url, body.role)
        return await self.engines()

    async def remove(self, engine: str, drain: bool = True) -> EngineList:
        """Forget an engine when its requests have ended. drain=false: they go on elsewhere, now."""
        with _refusals("engine"):
            await self._registry.remove(engine, drain=drain)
        return await self.engines()

    async def drain(self, engine: str) -> EngineList:
        """Give an engine no new requests; answers when those that run have ended."""
        with _refusals("engine"):
            await self._registry.drain(engine)
        return await self.engines()

    async def undrain(self, engine: str) -> EngineList:
        """Give an engine requests again."""
        with _refusals("engine"):
            self._registry.undrain(engine)
        return await self.engines()

    async def set_role(self, engine: str, request: Request) -> EngineList:
        """Move an engine into another pool; what runs on it goes on."""
        body = await read_body(request, RoleRequest)
        with _refusals("engine"):
            await self._registry.set_role(engine, body.role)
        return await self.engines()


@contextmanager
def _refusals(param: str) -> Iterator[None]:
    """What the registry refuses is the caller's fault here."""
    try:
        yield
    except ConfigError as error:
        raise InvalidRequest(error.message, param=param) from error


def _state(peer: Peer) -> EngineState:
    client = peer.client
    return EngineState(
        id=None if client.info is None else client.info.engine_id,
        url=client.url,
        role=client.role,
        state=peer.status,
        reason=peer.reason,
        in_flight=client.in_flight,
    )
