"""A router process from its start to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from microserving.front.serving import bind_listener, run_on_uvloop, serve_app
from microserving.router.app import Router
from microserving.router.config import RouterConfig

_logger = logging.getLogger(__name__)


def run_router(config: RouterConfig, *, on_ready: Callable[[int], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM. on_ready: called once with the port when requests are taken.

    Raises StartupError, one line: the program is wrong, the port is busy, a peer is missing or does not fit.
    """
    run_on_uvloop(_serve(config, on_ready))


async def _serve(config: RouterConfig, on_ready: Callable[[int], None] | None) -> None:
    router = Router(config)
    listener = bind_listener(config.serving_bind, config.port)
    port: int = listener.getsockname()[1]
    try:
        await router.start()
        async with router.admin_served():
            await serve_app(
                router.app,
                listener,
                stopping=router.wind_down,
                drain_s=config.shutdown_timeout_s,
                on_started=None if on_ready is None else lambda: on_ready(port),
            )
    finally:
        listener.close()
        await router.stop()
