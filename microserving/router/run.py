"""A router process from its start to its end."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

from microserving.front.serving import bind_listener, run_on_uvloop, serve_app
from microserving.router.app import Router
from microserving.router.config import RouterConfig

_logger = logging.getLogger(__name__)
_COLLECT_AFTER = 20_000
"""Objects that came to stay since the last collection; Python's own 700 are those of ten requests."""


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
            _spare_the_collector()
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


def _spare_the_collector() -> None:
    """What has been loaded is there to stay: the garbage collector need not look at it again. And requests leave few
    cycles behind them, so that it is worth looking seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
