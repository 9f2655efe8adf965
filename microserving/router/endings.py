"""Ending what was begun, within bounds: whoever waits for it has others to serve.

Knows neither who began it nor what it holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from microserving.errors import EngineUnavailable, MicroservingError
from microserving.program import EngineClient, Request
from microserving.router.chunk_stream import close

_logger = logging.getLogger(__name__)

_CLING_S = 0.5
"""How long code that closes may go on once it was cancelled."""


async def close_within(chunks: AsyncIterator[Any], timeout_s: float) -> None:
    """``close``, but bounded, and an error is only logged: there is nobody left to tell. In a task of its own: what does
    not end when that is cancelled, either, is left."""
    if getattr(chunks, "ag_frame", chunks) is None:
        return
    closing = asyncio.create_task(_close(chunks))
    try:
        await asyncio.wait((closing,), timeout=timeout_s)
    finally:
        closing.cancel()
    if closing.done():
        return
    _logger.warning("a stream did not close within %g s", timeout_s)
    await asyncio.wait((closing,), timeout=_CLING_S)
    if not closing.done():
        _logger.warning("%r does not close although it was cancelled, and is left", chunks)


async def _close(chunks: AsyncIterator[Any]) -> None:
    try:
        await close(chunks)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - a program's clean-up may raise anything
        _logger.warning("a stream did not close: %r", error)


async def abort_within(engine: EngineClient, request: Request, timeout_s: float) -> None:
    """Tell ``engine`` to forget the request. That it failed is only logged."""
    try:
        async with asyncio.timeout(timeout_s):
            await engine.abort(request)
    except (MicroservingError, TimeoutError) as error:
        # Of an engine that is gone the registry has told already.
        level = logging.INFO if isinstance(error, EngineUnavailable) else logging.WARNING
        why = error if str(error) else f"no answer within {timeout_s:g} s"  # a TimeoutError has no words
        _logger.log(level, "could not abort request %s on %s: %s", request.request_id, engine.id, why)
