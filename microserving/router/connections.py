"""HTTP connections to one engine: pooled, kept alive, and safe against the race in which one was just closed.

Knows HTTP only; ``engine_client`` knows what is asked over it.
"""

from __future__ import annotations

from typing import Any

import httpx

KEEPALIVE_S = 4.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn closes one."""
MAX_IDLE_CONNECTIONS = 256


def open_connections(base_url: str, *, connect_timeout_s: float) -> httpx.AsyncClient:
    """A client for one engine. Only connecting is timed: how long an answer may take is the caller's business."""
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=MAX_IDLE_CONNECTIONS, keepalive_expiry=KEEPALIVE_S
    )
    verify = base_url.startswith("https:")  # loading the certificates takes a tenth of a second an engine
    return httpx.AsyncClient(
        base_url=base_url,
        transport=RetryStale(httpx.AsyncHTTPTransport(limits=limits, trust_env=False, verify=verify)),
        timeout=httpx.Timeout(None, connect=connect_timeout_s),
        headers={"accept-encoding": "identity"},
        trust_env=False,
    )


class RetryStale(httpx.AsyncBaseTransport):
    """Sends a request once more when a reused connection breaks before any part of the answer came.

    That is what the server's closing an idle connection looks like when it crosses our request. A server that did
    read the request refuses the second one, because its id is in use: nothing is ever done twice.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        is_new = False

        async def trace(event: str, _info: dict[str, Any]) -> None:
            nonlocal is_new
            if event == "connection.connect_tcp.started":
                is_new = True

        request.extensions = {**request.extensions, "trace": trace}
        try:
            return await self._inner.handle_async_request(request)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            if is_new:
                raise
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()
