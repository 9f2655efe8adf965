"""All parts of a router, wired: program, engines, health, the OpenAI front, and `/router/stats`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette

from microserving.front import Exchange, FrontSettings, create_front, route
from microserving.program import setting_types
from microserving.router.config import RouterConfig, Setting
from microserving.router.engine_client import EngineTimeouts
from microserving.router.engine_registry import EngineRegistry, Peer
from microserving.router.health import HealthMonitor, ProbeSettings
from microserving.router.program_host import ProgramHost
from microserving.router.program_loader import load_program


class Router:
    """``app`` serves from ``start`` to ``stop``; its lifespan does both, for servers that run lifespans.

    Raises: ProgramError when the program cannot be loaded.
    """

    def __init__(self, config: RouterConfig) -> None:
        program = load_program(config.program, config.program_settings)
        timeouts = EngineTimeouts(
            config.connect_timeout_s, config.prep_recv_timeout_s, config.stage_timeout_s
        )
        probes = ProbeSettings(config.probe_interval_s, config.probe_timeout_s, config.probe_misses)
        self._config = config
        self._registry = EngineRegistry(config.prefill_peers, config.decode_peers, timeouts)
        self._monitor = HealthMonitor(self._registry, probes)
        self._host = ProgramHost(
            program,
            self._registry.cluster,
            self._registry.in_flight,
            self._monitor,
            release_timeout_s=config.release_timeout_s,
        )
        settings = FrontSettings(strict_fields=config.strict_fields)
        self.app: Starlette = create_front(
            self._host,
            settings,
            extra_routes=[route("GET", "/router/stats", self._stats, settings)],
            lifespan=self._lifespan,
        )

    async def start(self) -> None:
        """Reach every peer, then serve. Raises ConfigError, one line, when one does not answer or does not fit."""
        try:
            await self._monitor.connect(self._config.peer_timeout_s)
        except BaseException:
            await self._registry.close()
            raise
        self._monitor.start()
        self._host.start()

    async def end_requests(self) -> None:
        """Take no more requests, and end those that run with an error."""
        self._host.refuse_requests()
        await self._monitor.stop()
        for peer in self._registry.peers:
            peer.client.give_up("was given up: the router stops")

    async def stop(self) -> None:
        """Give back all that requests held, and end every task. Idempotent."""
        await self._host.stop()
        await self._monitor.stop()
        await self._registry.close()

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        await self.start()
        try:
            yield
        finally:
            await self.stop()

    async def _stats(self, exchange: Exchange) -> None:
        program = self._host.program
        settings = {
            name: _shown(getattr(program.instance, name)) for name in setting_types(type(program.instance))
        }
        await exchange.reply_json(
            {
                "program": {"name": program.name, "settings": settings},
                "requests_in_flight": self._host.running,
                "engines": [_engine_stats(peer) for peer in self._registry.peers],
            }
        )


def create_app(config: RouterConfig) -> Starlette:
    """The router as an ASGI app that starts and stops with its lifespan."""
    return Router(config).app


def _engine_stats(peer: Peer) -> dict[str, Any]:
    """No address: the node id, which is unknown until the engine was reached."""
    client = peer.client
    return {
        "id": None if client.info is None else client.info.engine_id,
        "role": client.role,
        "state": peer.state,
        "in_flight": client.in_flight,
        "load": asdict(client.load),
    }


def _shown(value: object) -> Setting:
    return value if isinstance(value, Setting) else repr(value)
