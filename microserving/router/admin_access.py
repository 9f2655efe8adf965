"""Who may use the admin routes: a wall in front of the whole admin app.

Admin routes run code that callers send. Whoever holds the key may use them; without a key (only on loopback or a
private socket) everybody on this machine may, but no web page that happens to be open there.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from microserving.errors import ConfigError
from microserving.front.control import plain_response
from microserving.protocol.addresses import is_loopback

MIN_KEY_BYTES = 16


def read_key(path: Path) -> bytes:
    """The key in a file, without white space around it. Raises ConfigError."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the admin key file {path}: {error.strerror}") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"the admin key in {path} is {len(key)} bytes; it needs at least {MIN_KEY_BYTES}")
    return key


class AdminAccess:
    """key: what callers send as bearer token, None = none needed. any_host: the listener is no TCP port."""

    def __init__(self, app: ASGIApp, key: bytes | None, *, any_host: bool) -> None:
        self._app = app
        self._key = key
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if self._key is not None and not self._is_authorized(headers):
                refusal = plain_response(
                    401, "invalid_api_key", {"www-authenticate": "Bearer"}, message="the admin key is wrong"
                )
                await refusal(scope, receive, send)
                return
            if self._key is None and self._comes_from_a_page(headers):
                refusal = plain_response(
                    403, "forbidden", message="admin routes without a key are not for web pages"
                )
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_authorized(self, headers: Headers) -> bool:
        assert self._key is not None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Constant time; only the length is told.
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._key)

    def _comes_from_a_page(self, headers: Headers) -> bool:
        """A browser names the page's origin; a page whose name was made to resolve to us names a foreign host."""
        host = headers.get("host", "").rpartition("@")[2]
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return "origin" in headers or not (self._any_host or is_loopback(name))
