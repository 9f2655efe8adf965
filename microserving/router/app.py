"""All parts of a router, wired: program, engines, health, the OpenAI front, and `/router/stats`."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from microserving.errors import Unauthorized
from microserving.front import ApiKeys, ClientLimits, FrontSettings, control_router, create_front
from microserving.front.access import read_bearer
from microserving.observability.metrics import CONTENT_TYPE, Exposition
from microserving.program import Cluster, EngineLoad
from microserving.router.admin import ProgramAdmin, create_admin_app
from microserving.router.admin_access import read_key
from microserving.router.admin_engines import EngineAdmin
from microserving.router.admin_listener import admin_served
from microserving.router.admin_requests import RequestAdmin
from microserving.router.admission import Admission, AdmissionSettings
from microserving.router.circuit import CircuitSettings
from microserving.router.config import RouterConfig
from microserving.router.deployment import Deployer
from microserving.router.dispatch import Dispatcher, DispatchSettings
from microserving.router.dry_run import Roles
from microserving.router.engine_client import EngineTimeouts
from microserving.router.engine_registry import EngineRegistry
from microserving.router.health import HealthMonitor, ProbeSettings
from microserving.router.program_host import HostSettings, ProgramHost
from microserving.router.program_loader import load_program
from microserving.router.program_memory import ProgramMemory
from microserving.router.readiness import Readiness
from microserving.router.retries import RetrySettings
from microserving.router.stats import RouterFigures, RouterStats

_logger = logging.getLogger(__name__)
CLEAN_UP_S = 30.0
"""How long giving back what requests held may take at the end; each single step of it has a shorter limit."""


class Router:
    """``app`` serves from ``start`` to ``stop``; its lifespan does both, for servers that run lifespans.

    Raises: ProgramError when the program cannot be loaded.
    """

    def __init__(self, config: RouterConfig) -> None:
        timeouts = EngineTimeouts(
            config.connect_timeout_s,
            config.prep_recv_timeout_s,
            config.stage_timeout_s,
            None if config.engine_api_key_file is None else read_bearer(config.engine_api_key_file),
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
        self._host = _host(config, self._registry.cluster)
        self._deployer = Deployer(self._host, self._roles, dry_run_timeout_s=config.dry_run_timeout_s)
        self._admission = Admission(_admission_settings(config), self._decode_loads)
        self._dispatcher = Dispatcher(
            self._host,
            self._registry.cluster,
            self._registry.in_flight,
            self._monitor,
            _dispatching(config),
            on_failure=self._registry.suspect,
            admission=self._admission,
        )
        self._figures = RouterFigures(self._registry, self._host, self._dispatcher, self._admission)
        self._dispatcher.ledger.on_ended = self._figures.ended
        self._exposition = Exposition(self._figures.figures)
        self._admin_key = None if config.admin_key_file is None else read_key(config.admin_key_file)
        control = control_router()
        control.add_api_route("/router/stats", self.stats, response_model=RouterStats)
        control.add_api_route("/metrics", self.metrics, response_class=PlainTextResponse)
        self.app: FastAPI = create_front(
            self._dispatcher,
            dataclasses.replace(_front_settings(config), on_ended=self._figures.request_ended),
            title="microserving router",
            control=control,
            lifespan=self._lifespan,
            check_ready=Readiness(self._host, self._registry.cluster, self._deployer).check,
        )
        self.admin_app: FastAPI = create_admin_app(
            ProgramAdmin(self._host, self._deployer).router(),
            EngineAdmin(self._registry).router(),
            RequestAdmin(self._dispatcher.ledger).router(),
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

    async def wind_down(self) -> None:
        """Take no more requests; let those that run finish, and end with an error what takes too long for that."""
        self._admission.close()
        if (running := self._admission.admitted) and self._config.shutdown_timeout_s:
            _logger.warning(
                "waiting at most %g s for running requests to finish (told again: not at all): %d",
                self._config.shutdown_timeout_s,
                running,
            )
        await self._admission.until_idle(self._config.shutdown_timeout_s)
        await self.end_requests()

    async def end_requests(self) -> None:
        """Take no more requests, and end those that run with an error."""
        self._admission.close()
        self._dispatcher.refuse_requests()
        await self._monitor.stop()
        for peer in self._registry.peers:
            peer.client.shut_down()

    async def stop(self) -> None:
        """Give back all that requests held, and end every task. Idempotent."""
        await self._deployer.close()
        await self._host.stop()
        try:
            async with asyncio.timeout(CLEAN_UP_S):
                await self._dispatcher.stop()
        except TimeoutError:
            _logger.warning("a router program does not let go of its requests: they are left")
        await self._monitor.stop()
        await self._registry.close()

    def admin_served(self) -> AbstractAsyncContextManager[None]:
        """Serve the admin routes where the configuration says, for as long as the block runs. Raises StartupError."""
        return admin_served(self.admin_app, self._config)

    def _decode_loads(self) -> list[EngineLoad]:
        return [engine.load for engine in self._registry.cluster.decode or self._registry.cluster.all]

    def _roles(self) -> Roles:
        """Of the engines that there are, up or not."""
        count = Counter(peer.client.role for peer in self._registry.peers)
        return Roles(count["prefill"], count["decode"], count["hybrid"])

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    async def stats(self, request: HttpRequest) -> RouterStats:
        """The program, and what every engine does. `?addresses=1` with the admin key: where the engines are, too."""
        addresses = request.query_params.get("addresses") == "1"
        if addresses and not self._is_admin(request):
            raise Unauthorized("addresses are shown to callers with the admin key only")
        return self._figures.stats(addresses=addresses)

    async def metrics(self) -> Response:
        """In Prometheus' text format."""
        return Response(self._exposition.text(), media_type=CONTENT_TYPE)

    def _is_admin(self, request: HttpRequest) -> bool:
        """With API keys on the front, too, the authorization header is taken: the admin key has one of its own."""
        given = request.headers.getlist("x-admin-key")
        return (
            self._admin_key is not None
            and len(given) == 1
            and hmac.compare_digest(given[0].encode("latin-1"), self._admin_key)
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


def _admission_settings(config: RouterConfig) -> AdmissionSettings:
    return AdmissionSettings(
        max_in_flight=config.max_in_flight,
        action=config.admission,
        queue_size=config.queue_size,
        queue_timeout_s=config.queue_timeout_s,
    )


def _front_settings(config: RouterConfig) -> FrontSettings:
    return FrontSettings(
        max_body_bytes=config.max_body_bytes,
        write_timeout_s=config.write_timeout_s,
        strict_fields=config.strict_fields,
        api_keys=None if config.api_key_file is None else ApiKeys.read(config.api_key_file),
        client_limits=ClientLimits(config.max_concurrent_per_client, config.requests_per_minute),
        cors_origins=config.cors_origins,
    )


def create_app(config: RouterConfig) -> FastAPI:
    """The router as an ASGI app that starts and stops with its lifespan."""
    return Router(config).app


def _host(config: RouterConfig, cluster: Cluster) -> ProgramHost:
    """With what was deployed last, or the configured program. Raises ProgramError, ConfigError."""
    memory = ProgramMemory(config.program_state_file, config.program, config.program_settings)
    recalled = memory.recall()
    if recalled is None:
        program = load_program(config.program, config.program_settings)
    else:
        program = recalled.versions[-1].program
    host = ProgramHost(program, cluster, _host_settings(config))
    if recalled is not None:
        host.resume(recalled.versions, recalled.last_number)
    host.on_change = partial(memory.remember, host)
    return host


def _host_settings(config: RouterConfig) -> HostSettings:
    return HostSettings(
        kept=config.kept_programs,
        drain_timeout_s=config.program_drain_timeout_s,
        rollback_window=config.rollback_window,
        rollback_threshold=config.rollback_threshold,
    )
