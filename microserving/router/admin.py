"""The admin app: status, deployment and rollback of programs. (Engines: ``admin_engines``; who may: ``admin_access``.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from microserving.errors import PayloadTooLarge
from microserving.front import control_router
from microserving.front.control import plain_response
from microserving.program import setting_types
from microserving.protocol.body import (
    WireModel,
    ignored_fields,
    invalid,
    parse_object,
    refuse_ignored,
    validate,
)
from microserving.router.config import Setting
from microserving.router.deployment import Deployer
from microserving.router.program_host import ProgramHost, Version, VersionState
from microserving.router.program_loader import (
    MAX_PROGRAM_BYTES,
    ProgramSource,
    read_program,
    shipped_programs,
    source_of,
    summary,
)

MAX_BODY_BYTES = 4 * MAX_PROGRAM_BYTES
"""A program in JSON's escapes."""
ModelT = TypeVar("ModelT", bound=WireModel)


class DeployRequest(WireModel):
    """path: a file on the router's machine or the name of a shipped program; with source only what messages call it.

    source: the program's text.
    """

    path: str = Field(min_length=1, max_length=4096)
    source: str | None = None
    settings: dict[str, Setting] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _path_is_printable(self) -> DeployRequest:
        if not self.path.isprintable():
            raise invalid("path must be printable")
        return self

    def read(self) -> ProgramSource:
        """Raises ProgramError."""
        if self.source is None:
            return read_program(self.path)
        return source_of(Path(self.path), self.source.encode("utf-8"))


class VersionStatus(BaseModel):
    """attempts: under way. ok, failed: attempts that ended well, or failed through the program's fault."""

    version: int
    name: str
    path: str
    settings: dict[str, Setting]
    state: VersionState
    since: float
    attempts: int
    ok: int
    failed: int


class RollbackStatus(BaseModel):
    version: int
    name: str
    back_to: int
    reason: str
    automatic: bool
    at: float


class ProgramStatus(BaseModel):
    """versions: the newest first. deployments, rollbacks, refused: since the router started."""

    in_charge: VersionStatus
    versions: list[VersionStatus]
    deployments: int
    rollbacks: int
    refused: int
    last_rollback: RollbackStatus | None


class ShippedProgram(BaseModel):
    """summary: the first paragraph of its docstring."""

    name: str
    summary: str


class ProgramList(BaseModel):
    programs: list[ShippedProgram]


class ProgramAdmin:
    """The handlers of `/admin/program...`."""

    def __init__(self, host: ProgramHost, deployer: Deployer) -> None:
        self._host = host
        self._deployer = deployer

    def router(self) -> APIRouter:
        router = control_router()
        router.add_api_route("/admin/program", self.status, response_model=ProgramStatus)
        router.add_api_route(
            "/admin/program/deploy", self.deploy, methods=["POST"], response_model=ProgramStatus
        )
        router.add_api_route(
            "/admin/program/rollback", self.rollback, methods=["POST"], response_model=ProgramStatus
        )
        router.add_api_route("/admin/programs", self.programs, response_model=ProgramList)
        return router

    async def status(self) -> ProgramStatus:
        """The program in charge, those kept for rollbacks, and those that still finish requests."""
        versions = [_version_status(version, state) for version, state in self._host.versions]
        last = self._host.last_rollback
        return ProgramStatus(
            in_charge=next(version for version in versions if version.state == "in_charge"),
            versions=versions,
            deployments=self._host.deployments,
            rollbacks=self._host.rollbacks,
            refused=self._deployer.refused,
            last_rollback=None if last is None else RollbackStatus(**_fields(last)),
        )

    async def deploy(self, request: Request) -> ProgramStatus:
        """Check a program, try it on engines in memory, and put it in charge."""
        body = await read_body(request, DeployRequest)
        await self._deployer.deploy(body.read(), body.settings)
        return await self.status()

    async def rollback(self) -> ProgramStatus:
        """Put the program before this one in charge again."""
        self._host.roll_back()
        return await self.status()

    async def programs(self) -> ProgramList:
        """The programs that a deployment can name."""
        return ProgramList(programs=[ShippedProgram(name=n, summary=summary(n)) for n in shipped_programs()])


def create_admin_app(*routers: APIRouter) -> FastAPI:
    """An app of nothing but these routes."""
    app = FastAPI(
        title="microserving router admin",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={404: _unknown_route, 405: _wrong_method},
    )
    for router in routers:
        app.include_router(router)
    return app


async def read_body(request: Request, model: type[ModelT]) -> ModelT:
    """The bounded JSON body. Raises InvalidRequest (also for unknown fields), PayloadTooLarge."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    body = parse_object(bytes(data))
    refuse_ignored(ignored_fields(model, body))
    return validate(model, body)


def shown_settings(version: Version) -> dict[str, Setting]:
    """The settings of a program with their values, as text where they are no plain value."""
    instance = version.program.instance
    values = {name: getattr(instance, name) for name in setting_types(type(instance))}
    return {
        name: value if isinstance(value, str | int | float | bool) else repr(value)
        for name, value in values.items()
    }


def _version_status(version: Version, state: VersionState) -> VersionStatus:
    return VersionStatus(
        version=version.number,
        name=version.program.name,
        path=str(version.program.path),
        settings=shown_settings(version),
        state=state,
        since=version.since,
        attempts=version.uses,
        ok=version.ok,
        failed=version.failed,
    )


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__}


async def _unknown_route(_: Request, __: Exception) -> Response:
    return plain_response(404, "unknown_url", message="there is no such admin route")


async def _wrong_method(_: Request, error: Exception) -> Response:
    return plain_response(405, "method_not_allowed", getattr(error, "headers", None))
