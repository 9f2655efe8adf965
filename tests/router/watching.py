"""A registry and its health monitor over scripted engines behind real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any

from microserving.program.testing import make_request
from microserving.router.engine_client import EngineTimeouts
from microserving.router.engine_registry import EngineRegistry, Peer
from microserving.router.health import HealthMonitor, ProbeSettings
from microserving.tokenizer import Tokenizer

from .engine_server import EngineServer

REQUEST = make_request([1, 2, 3])
PREFILL = {"engine_id": "prefill-0", "node_role": "prefill"}


class Watched:
    """A registry and its monitor over some servers. Every tokenizer that was loaded is counted."""

    def __init__(
        self,
        prefill: Iterable[EngineServer] = (),
        decode: Iterable[EngineServer] = (),
        **probes: Any,
    ) -> None:
        self.tokenizers: list[dict[str, Any]] = []
        self.registry = EngineRegistry(
            [engine.url for engine in prefill], [engine.url for engine in decode], EngineTimeouts()
        )
        settings = ProbeSettings(**({"interval_s": 0.02, "timeout_s": 1.0} | probes))
        self.monitor = HealthMonitor(self.registry, settings, load_tokenizer=self._load)

    def _load(self, data: dict[str, Any]) -> Tokenizer:
        self.tokenizers.append(data)
        return Tokenizer.from_dict(data)

    @property
    def states(self) -> list[str]:
        return [peer.state for peer in self.registry.peers]

    def ids(self, pool: str) -> list[str]:
        return [engine.id for engine in getattr(self.registry.cluster, pool)]

    async def until(self, state: str, peer: int = 0) -> Peer:
        """Wait (at most 5 s) until the watching tasks have brought a peer into ``state``."""
        watched = self.registry.peers[peer]
        async with asyncio.timeout(5):
            while watched.state != state:  # noqa: ASYNC110 - what is tested has no event
                await asyncio.sleep(0.002)
        return watched

    async def close(self) -> None:
        await self.monitor.stop()
        await self.registry.close()


def run(scenario: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await scenario(stack)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


async def engines(stack: AsyncExitStack, *infos: dict[str, Any]) -> list[EngineServer]:
    return [await stack.enter_async_context(EngineServer(**info)) for info in infos]


def watched(stack: AsyncExitStack, *args: Any, **kwargs: Any) -> Watched:
    result = Watched(*args, **kwargs)
    stack.push_async_callback(result.close)
    return result
