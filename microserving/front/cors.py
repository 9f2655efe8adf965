"""Which web pages may ask: cross-origin requests (the fetch standard's CORS). Off unless origins are named."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response

from microserving.front.channel import Header

_METHODS = "GET, POST, OPTIONS"
_HEADERS = "authorization, content-type, x-request-id, x-request-timeout"
_MAX_AGE_S = 600


class Cors:
    """origins: `https://host:port`, or `*` for all."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._all = "*" in origins
        self._origins = frozenset(origin.rstrip("/").encode("latin-1") for origin in origins)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def headers(self, request: Sequence[Header]) -> list[Header]:
        """What an answer needs so that the page which asked may read it."""
        origin = next((value for name, value in request if name == b"origin"), None)
        if origin is None or not (self._all or origin in self._origins):
            return [(b"vary", b"origin")] if self._origins and not self._all else []
        return [
            (b"access-control-allow-origin", b"*" if self._all else origin),
            (b"access-control-expose-headers", b"x-request-id, x-ignored-fields, retry-after"),
            (b"vary", b"origin"),
        ]

    def preflight(self, method: str, request: Sequence[Header]) -> Response | None:
        """The answer to a browser's question whether it may ask; None when this is none."""
        asked = any(name == b"access-control-request-method" for name, _ in request)
        if not self._origins or method != "OPTIONS" or not asked:
            return None
        response = Response(status_code=204)
        allowed = self.headers(request)
        response.raw_headers.extend(allowed)
        if len(allowed) > 1:
            response.headers["access-control-allow-methods"] = _METHODS
            response.headers["access-control-allow-headers"] = _HEADERS
            response.headers["access-control-max-age"] = str(_MAX_AGE_S)
        return response
