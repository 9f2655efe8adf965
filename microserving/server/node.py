"""One engine process's parts, wired: engine, hand-off, transport and app; how they start and in which order they end.

Does not know where the runner, the tokenizer and the transport come from (``run``, or a test with fakes).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from starlette.applications import Starlette

from microserving.engine.async_engine import AsyncEngine
from microserving.engine.config import EngineConfig
from microserving.engine.engine import Engine
from microserving.engine.handoff import EngineIdentity, HandoffReceiver, HandoffSender
from microserving.engine.runner import ModelRunner
from microserving.front import ApiKeys, ClientLimits, FrontSettings, serve_app
from microserving.protocol.kv_descriptor import secret_id
from microserving.protocol.kv_layout import KVLayout
from microserving.protocol.microserving import PROTOCOL_VERSION, EngineInfo
from microserving.server.app import create_app
from microserving.server.services import EngineServices
from microserving.tokenizer import Tokenizer
from microserving.transports import Transport

_logger = logging.getLogger(__name__)
_IDLE_POLL_S = 0.05
STOP_S = 2.0
"""How long ending the running requests may take when the process stops."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a node is made of. The transport has allocated the runner's pool and is not served yet.

    secret: the cluster's, None when there is none.
    """

    runner: ModelRunner
    tokenizer: Tokenizer
    transport: Transport
    layout: KVLayout
    model_name: str
    model_hash: str
    secret: bytes | None


class EngineNode:
    """Starts once, stops once (idempotent)."""

    def __init__(self, config: EngineConfig, parts: EngineParts) -> None:
        """Raises ConfigError when the secret is too short."""
        identity = EngineIdentity(config.node_id, uuid.uuid4().hex, config.rank)
        engine = AsyncEngine(
            Engine(parts.runner, parts.tokenizer, config),
            reserve_wait_s=config.reserve_wait_s,
            max_waiting=config.ingestion_queue_size,
        )
        self._transport = parts.transport
        self._total_pages = parts.runner.total_pages
        self._drain_s = config.drain_s
        self._settings = front_settings(config)
        self.services = EngineServices(
            engine=engine,
            tokenizer=parts.tokenizer,
            receiver=HandoffReceiver(identity, parts.layout, parts.model_hash, parts.secret),
            sender=HandoffSender(
                parts.transport,
                engine,
                parts.layout,
                parts.model_hash,
                parts.secret,
                timeout_s=config.transfer_timeout_s,
            ),
            info=_info(config, parts, identity, engine.max_context),
        )

    def create_app(self) -> Starlette:
        return create_app(self.services, self._settings)

    async def start(self) -> None:
        """Start the engine, then accept writers. Raises StartupError."""
        services = self.services
        services.engine.engine.on_revoked = self._transport.revoke
        await asyncio.to_thread(services.engine.grammars.prepare)  # now: later it would hold up streams
        await services.engine.start()
        self._transport.serve(
            services.info.engine_id, services.info.epoch, self._total_pages, services.engine.engine
        )

    async def wind_down(self) -> None:
        """Let the requests that run finish, and end with an error what takes too long for that."""
        if (running := self._running()) and self._drain_s:
            _logger.warning(
                "waiting at most %g s for running requests to finish (told again: not at all): %d",
                self._drain_s,
                running,
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while self._running():  # noqa: ASYNC110 - the engine's thread has no event for it
                    await asyncio.sleep(_IDLE_POLL_S)
        await self.end_requests()

    def _running(self) -> int:
        load = self.services.engine.load()
        return load.running + load.waiting

    async def end_requests(self) -> None:
        """Every request ends with an error, receivers of running sends are told; no new ones are taken.

        Returns after ``STOP_S`` at the latest; ``stop`` waits for what has not ended by then.
        """
        ending = [
            asyncio.create_task(self.services.engine.stop()),
            asyncio.create_task(self.services.sender.close()),
        ]
        done, _ = await asyncio.wait(ending, timeout=STOP_S)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """However long the running step takes: closing a link tells its receiver that no put runs any more."""
        try:
            await self.services.engine.stop()
        finally:
            self._transport.close()
        await self.services.sender.close()  # last: without links no hand-shake waits for a silent receiver

    async def serve(self, listener: socket.socket, *, on_ready: Callable[[int], None] | None = None) -> None:
        """Serve on ``listener`` until SIGINT or SIGTERM; everything is freed when this returns.

        on_ready: called once with the port when requests are taken.
        """
        port: int = listener.getsockname()[1]
        try:
            await self.start()
            await serve_app(
                self.create_app(),
                listener,
                stopping=self.wind_down,
                drain_s=self._drain_s,
                on_started=None if on_ready is None else lambda: on_ready(port),
            )
        finally:
            await self.stop()


def front_settings(config: EngineConfig) -> FrontSettings:
    """The front's part of an engine's configuration. Raises ConfigError when the keys cannot be read."""
    return FrontSettings(
        max_body_bytes=config.max_body_bytes,
        strict_fields=config.strict_fields,
        api_keys=None if config.api_key_file is None else ApiKeys.read(config.api_key_file),
        client_limits=ClientLimits(config.max_concurrent_per_client, config.requests_per_minute),
    )


def _info(config: EngineConfig, parts: EngineParts, identity: EngineIdentity, max_context: int) -> EngineInfo:
    return EngineInfo(
        protocol_version=PROTOCOL_VERSION,
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        rank=identity.rank,
        node_role=config.node_role,
        model=parts.model_name,
        aliases=list(config.served_model_name[1:]),
        model_hash=parts.model_hash,
        kv_layout_hash=parts.layout.hash,
        kv_bytes_per_token=parts.layout.bytes_per_token,
        page_size=parts.layout.page_size,
        total_pages=parts.runner.total_pages,
        max_context=max_context,
        created=int(time.time()),
        transports={parts.transport.name: dict(parts.transport.describe())},
        cluster_secret_id=secret_id(parts.secret),
    )
