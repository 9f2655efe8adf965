"""All parts of a router, wired: program, engines, health, the OpenAI front, and `/router/stats`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from pydantic import BaseModel

from microserving.front import FrontSettings, control_router, create_front
from microserving.program import EngineLoad, EngineRole, setting_types
from microserving.router.admin import ProgramAdmin, create_admin_app
from microserving.router.admin_engines import EngineAdmin
from microserving.router.admin_listener import admin_served
from microserving.router.circuit import CircuitSettings
from microserving.router.config import RouterConfig, Setting
from microserving.router.deployment import Deployer
from microserving.router.dispatch import Dispatcher, DispatchSettings
from microserving.router.engine_client import EngineTimeouts
from microserving.router.engine_registry import EngineRegistry, Peer, Status
from microserving.router.health import HealthMonitor, ProbeSettings
from microserving.router.program_host import HostSettings, ProgramHost
from microserving.router.program_loader import load_program
from microserving.router.retries import RetrySettings


class ProgramStats(BaseModel):
    """version: 1 is the program that the router started with. rollbacks: automatic ones too, since then."""

    name: str
    settings: dict[str, Setting]
    version: int
    rollbacks: int


class EngineStats(BaseModel):
    """No address: the node id, which is unknown until the engine was reached."""

    id: str | None
    role: EngineRole
    state: Status
    in_flight: int
    load: EngineLoad


class RouterStats(BaseModel):
    """GET `/router/stats`. requests_in_flight: attempts under way."""

    program: ProgramStats
    requests_in_flight: int
    engines: list[EngineStats]


class Router:
    """``app`` serves from ``start`` to ``stop``; its lifespan does both, for servers that run lifespans.

    Raises: ProgramError when the program cannot be loaded.
    """

    def __init__(self, config: RouterConfig) -> None:
        program = load_program(config.program, config.program_settings)
        timeouts = EngineTimeouts(
            config.connect_timeout_s, config.prep_recv_timeout_s, config.stage_timeout_s
        )
        probes = ProbeSettings(
            config.probe_interval_s,
            config.probe_timeout_s,
            config.probe_misses,
            config.probe_connect_timeout_s,
        )
        self._config = config
        self._registry = EngineRegistry(
            config.prefill_peers,
            config.decode_peers,
            timeouts,
            CircuitSettings(config.circuit_failures),
            drain_timeout_s=config.engine_drain_timeout_s,
        )
        self._monitor = HealthMonitor(
            self._registry, probes, served_model=config.served_model, tokenizer_dir=config.tokenizer_dir
        )
        self._host = ProgramHost(program, self._registry.cluster, _host_settings(config))
        self._deployer = Deployer(self._host, self._pool_sizes, dry_run_timeout_s=config.dry_run_timeout_s)
        self._dispatcher = Dispatcher(
            self._host,
            self._registry.cluster,
            self._registry.in_flight,
            self._monitor,
            _dispatching(config),
            on_failure=self._registry.suspect,
        )
        settings = FrontSettings(strict_fields=config.strict_fields)
        control = control_router()
        control.add_api_route("/router/stats", self.stats, response_model=RouterStats)
        self.app: FastAPI = create_front(
            self._dispatcher, settings, title="microserving router", control=control, lifespan=self._lifespan
        )
        self.admin_app: FastAPI = create_admin_app(
            ProgramAdmin(self._host, self._deployer).router(), EngineAdmin(self._registry).router()
        )

    async def start(self) -> None:
        """Reach every peer, then serve. Raises ConfigError, one line, when one does not answer or does not fit (unless
        peers may be missing)."""
        try:
            if not self._config.allow_missing_peers:
                await self._monitor.connect(self._config.peer_timeout_s)
        except BaseException:
            await self._registry.close()
            raise
        self._monitor.start()
        self._host.start()

    async def end_requests(self) -> None:
        """Take no more requests, and end those that run with an error."""
        self._dispatcher.refuse_requests()
        await self._monitor.stop()
        for peer in self._registry.peers:
            peer.client.shut_down()

    async def stop(self) -> None:
        """Give back all that requests held, and end every task. Idempotent."""
        await self._deployer.close()
        await self._host.stop()
        await self._dispatcher.stop()
        await self._monitor.stop()
        await self._registry.close()

    def admin_served(self) -> AbstractAsyncContextManager[None]:
        """Serve the admin routes where the configuration says, for as long as the block runs. Raises StartupError."""
        return admin_served(self.admin_app, self._config)

    def _pool_sizes(self) -> tuple[int, int]:
        """How many engines there are to prefill and to decode, up or not."""
        roles = [peer.client.role for peer in self._registry.peers]
        return len(roles) - roles.count("decode"), len(roles) - roles.count("prefill")

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    async def stats(self) -> RouterStats:
        """The program, and what every engine does."""
        program = self._host.program
        settings = {
            name: _shown(getattr(program.instance, name)) for name in setting_types(type(program.instance))
        }
        return RouterStats(
            program=ProgramStats(
                name=program.name,
                settings=settings,
                version=self._host.current.number,
                rollbacks=self._host.rollbacks,
            ),
            requests_in_flight=self._dispatcher.running,
            engines=[_engine_stats(peer) for peer in self._registry.peers],
        )


def _dispatching(config: RouterConfig) -> DispatchSettings:
    retries = RetrySettings(
        max_attempts=config.max_attempts,
        budget_share=config.retry_budget_share,
        budget_burst=config.retry_budget_burst,
    )
    return DispatchSettings(
        config.release_timeout_s,
        config.request_timeout_s,
        config.stall_timeout_s,
        config.hedge_after_s,
        retries,
    )


def create_app(config: RouterConfig) -> FastAPI:
    """The router as an ASGI app that starts and stops with its lifespan."""
    return Router(config).app


def _host_settings(config: RouterConfig) -> HostSettings:
    return HostSettings(
        kept=config.kept_programs,
        drain_timeout_s=config.program_drain_timeout_s,
        rollback_window=config.rollback_window,
        rollback_threshold=config.rollback_threshold,
    )


def _engine_stats(peer: Peer) -> EngineStats:
    client = peer.client
    return EngineStats(
        id=None if client.info is None else client.info.engine_id,
        role=client.role,
        state=peer.status,
        in_flight=client.in_flight,
        load=client.load,
    )


def _shown(value: object) -> Setting:
    return value if isinstance(value, Setting) else repr(value)
