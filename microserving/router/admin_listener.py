"""The admin app's own listener: a loopback port or a private Unix socket, beside the router's public one."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from starlette.types import ASGIApp

from microserving.errors import StartupError
from microserving.front.serving import bind_listener, serving_beside
from microserving.router.admin_access import AdminAccess, read_key
from microserving.router.config import RouterConfig

_MAX_SOCKET_PATH_BYTES = 107


@contextlib.asynccontextmanager
async def admin_served(app: ASGIApp, config: RouterConfig) -> AsyncIterator[None]:
    """Serve ``app`` where ``config`` says, for as long as the block runs. Raises StartupError."""
    key = None if config.admin_key_file is None else read_key(config.admin_key_file)
    async with contextlib.AsyncExitStack() as stack:
        if config.admin_socket is not None:
            listener = stack.enter_context(_unix_listener(config.admin_socket))
            await stack.enter_async_context(serving_beside(AdminAccess(app, key, any_host=True), listener))
        if config.admin_port:
            listener = stack.enter_context(bind_listener(config.admin_bind, config.admin_port))
            await stack.enter_async_context(serving_beside(AdminAccess(app, key, any_host=False), listener))
        yield


@contextlib.contextmanager
def _unix_listener(path: Path) -> Iterator[socket.socket]:
    """A socket that only this user can connect to; its file is there as long as the block runs."""
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise StartupError(
            f"the path of the admin socket is longer than {_MAX_SOCKET_PATH_BYTES} bytes: {path}"
        )
    _remove_dead(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            os.fchmod(listener.fileno(), 0o600)  # the file is made with this mode
            listener.bind(str(path))
        except OSError as error:
            raise StartupError(f"cannot make the admin socket {path}: {error.strerror}") from error
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _remove_dead(path: Path) -> None:
    """A router that was killed leaves its socket's file. Raises StartupError when one answers there."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return  # binding will say that the name is taken
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return
        else:
            raise StartupError(f"a router listens on the admin socket {path} already")
