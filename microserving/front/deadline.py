"""How long a request may take, as its client says: the body's `timeout`, the header `x-request-timeout`, the smaller."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from microserving.errors import DeadlineExceeded, InvalidRequest
from microserving.front.exchange import Exchange
from microserving.protocol.openai import MAX_TIMEOUT_S

HEADER: Final = "x-request-timeout"
_SECONDS = re.compile(rb"[0-9]{1,10}(\.[0-9]{0,10})?")


def remaining_s(exchange: Exchange, timeout_s: float | None) -> float | None:
    """Seconds until the request's deadline, counted from its arrival; None when it has none. timeout_s: the body's.

    Raises InvalidRequest (a bad header), DeadlineExceeded when it has passed.
    """
    given = [limit for limit in (timeout_s, _header(exchange)) if limit is not None]
    if not given:
        return None
    remaining = min(given) - (time.monotonic() - exchange.arrived)
    if remaining <= 0:
        raise DeadlineExceeded(f"the request took longer than its timeout of {min(given):g} s")
    return remaining


@asynccontextmanager
async def before_deadline(remaining: float | None) -> AsyncIterator[None]:
    """Cancel the body ``remaining`` seconds from now and raise DeadlineExceeded; None = never."""
    try:
        async with asyncio.timeout(remaining):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the request took longer than its timeout") from None


def _header(exchange: Exchange) -> float | None:
    value = next((value for name, value in exchange.client_headers if name == HEADER.encode()), None)
    if value is None:
        return None
    if not _SECONDS.fullmatch(value) or not 0 < float(value) <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"must be seconds above 0 and at most {MAX_TIMEOUT_S:g}", param=HEADER)
    return float(value)
