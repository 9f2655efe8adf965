"""The two names of aiohttp that MLC's router files use, without a connection behind them.

The ``send_...`` methods of ``Router`` take a session, and do not need one here.
"""

from __future__ import annotations

from typing import Self


class ClientTimeout:
    """Accepts aiohttp's arguments, which have no effect: the router has timeouts of its own."""

    def __init__(self, **_limits: float | None) -> None:
        pass


class ClientSession:
    """To be passed to ``Router.send_...``."""

    def __init__(self, **_options: object) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        pass

    def post(self, url: str, **_options: object) -> object:
        """Raises NotImplementedError: the host could not free what it does not see."""
        raise NotImplementedError(
            "a router program has no connections of its own: use send_prepare_receive, send_remote_send and "
            "send_start_generate (which also serves whole requests, with begin=0)"
        )
