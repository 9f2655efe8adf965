"""A listening socket, and an app served on it until the process is told to stop.

Shared by engine and router processes. Owns sockets and signals; does not know the app. Logs, never prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Final

import uvicorn
import uvloop
from starlette.types import ASGIApp

from microserving.errors import StartupError
from microserving.front.http_protocol import BoundedHeadProtocol

_logger = logging.getLogger(__name__)
KEEP_ALIVE_S: Final = 75
"""How long an idle connection stays open: longer than any client pool of ours keeps one."""
GRACE_S: Final = 2
"""How long running requests may take to end once the process was told to stop."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def bind_listener(host: str, port: int) -> socket.socket:
    """A socket bound to ``host``:``port`` (0 = a free one), not listening yet: connections are refused until
    ``serve_app``. Raises StartupError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        # Without it a port whose last connections are in TIME_WAIT counts as busy.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: without it an answer's second packet may wait 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


async def serve_app(
    app: ASGIApp,
    listener: socket.socket,
    *,
    stopping: Callable[[], Awaitable[None]],
    on_started: Callable[[], None] | None = None,
    drain_s: float = 0.0,
) -> None:
    """Serve until SIGINT or SIGTERM (a second one does not wait for anything), then return.

    stopping: called at once after the signal, when no connection is taken any more; it makes the running requests end
    (their streams then end with an error event), and may let them finish for drain_s before. Requests that have not ended
    ``GRACE_S`` after that are cancelled. Raises StartupError when the port was taken.
    """
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    server = _Server(_configuration(app, drain_s + GRACE_S))
    with _signalled() as stop:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        _logger.info("listening on %s port %d", host, port)
        if on_started is not None:
            on_started()
        first = asyncio.create_task(stop.wait())
        await asyncio.wait((serving, first), return_when=asyncio.FIRST_COMPLETED)
        _logger.info("stopping")
        first.cancel()
        server.should_exit = True
        await asyncio.gather(_guarded(stopping()), serving)


@contextlib.asynccontextmanager
async def serving_beside(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve another app on a bound ``listener`` for as long as the block runs, whatever ``serve_app`` does meanwhile.

    Its requests get ``GRACE_S`` to end.
    """
    listener.listen(128)
    server = _Server(_configuration(app, GRACE_S))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


def run_on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run`` on a uvloop event loop, which ends also when a task swallows its cancellation.

    The loop does not keep a list of all async generators (a request has ten): each is closed by who made it.
    """

    async def run() -> None:
        sys.set_asyncgen_hooks(firstiter=None)
        try:
            await main
        finally:
            await _end_tasks()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def _end_tasks() -> None:
    """Cancel what is left. ``asyncio.run`` does, too, but would wait for ever for code of users that goes on."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if not left:
        return
    for task in left:
        task.cancel()
    _, clinging = await asyncio.wait(left, timeout=GRACE_S)
    for task in clinging:
        _logger.warning("a task does not end although it was cancelled, and is left: %r", task.get_coro())
        asyncio._unregister_task(task)


class _Server(uvicorn.Server):
    """Leaves signals to ``serve_app``: uvicorn would raise them again at its end, and the exit status be wrong."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _configuration(app: ASGIApp, grace_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=BoundedHeadProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(grace_s),
    )


@contextlib.contextmanager
def _signalled() -> Generator[asyncio.Event, None, None]:
    """An event that the first signal sets; a second signal ends the process. Needs the main thread."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            _logger.warning("told to stop a second time: ending at once")
            os._exit(1)
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


async def _guarded(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:  # stopping goes on whatever the owner's clean-up does
        _logger.exception("ending the running requests failed")


def _cannot_listen(host: str, port: int, error: OSError) -> StartupError:
    return StartupError(f"cannot listen on {host} port {port}: {error.strerror}")
