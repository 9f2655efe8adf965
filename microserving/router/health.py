"""Probes: finds out which engines are up, keeps their load fresh, and knows the model that they serve.

Reports what it finds to the registry. Every task it starts is ended by ``stop``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microserving.errors import MicroservingError, ModelLoadError
from microserving.front import ServedModel
from microserving.grammar import GrammarCompiler
from microserving.protocol.microserving import EngineInfo
from microserving.router.engine_registry import EngineRegistry, Peer, check_startup
from microserving.router.loop_lag import LoopLag
from microserving.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)

_STARTUP_POLL_S = 0.1
MAX_LAG_SHARE = 0.5
"""A probe that times out says nothing of the engine when our own loop was late for more of its time."""
REFRESH_GAP_S = 0.25
"""Re-probes because of requests begin at most this often."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Seconds between probes, for one, and for a connection within it.

    misses: probes in a row without an answer until an engine is down.
    """

    interval_s: float = 2.0
    timeout_s: float = 2.0
    misses: int = 3
    connect_timeout_s: float = 0.5


class HealthMonitor:
    """Probes the registry's peers. load_tokenizer: makes the tokenizer from an engine's JSON (``Tokenizer.from_dict``).

    ``model``, ``tokenizer`` and ``grammars`` are None until the first engine was reached; after that they stay, even
    while no engine is up. served_model: the only one that an engine may serve; tokenizer_dir: for engines that cannot
    give their tokenizer; both are known from the start. Raises ModelLoadError when that directory holds none.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        settings: ProbeSettings,
        *,
        load_tokenizer: Callable[[dict[str, Any]], Tokenizer] = Tokenizer.from_dict,
        served_model: str | None = None,
        tokenizer_dir: Path | None = None,
    ) -> None:
        self.model: ServedModel | None = None
        if served_model is not None:
            self.model = ServedModel(id=served_model, max_context=0, created=0)
        self._local_tokenizer = None if tokenizer_dir is None else _tokenizer_in(tokenizer_dir)
        self.tokenizer: Tokenizer | None = self._local_tokenizer
        self.grammars: GrammarCompiler | None = None
        self._served_model = served_model
        self._registry = registry
        self._settings = settings
        self._load_tokenizer = load_tokenizer
        self._model_hash: str | None = None
        self._learning = asyncio.Lock()
        self._tasks: dict[Peer, asyncio.Task[None]] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = -REFRESH_GAP_S

    @property
    def ready(self) -> bool:
        """Whether there is an engine and a tokenizer to serve with."""
        return self.tokenizer is not None and self._registry.serving

    async def connect(self, timeout_s: float) -> None:
        """Wait until every peer is up. Raises ConfigError when one is not within ``timeout_s``, or does not fit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._registry.all_up:
                    await self._probe_down()
                    check_startup([peer for peer in self._registry.peers if peer.state == "refused"], 0)
                    if not self._registry.all_up:
                        await asyncio.sleep(_STARTUP_POLL_S)
        check_startup(self._registry.peers, timeout_s)

    def start(self) -> None:
        """Probe from now on, also those that join later."""
        for peer in self._registry.peers:
            self._watch(peer)
        self._registry.on_added, self._registry.on_removed = self._watch, self._leave

    async def stop(self) -> None:
        """Idempotent."""
        self._registry.on_added = self._registry.on_removed = None
        tasks = [*self._tasks.values(), *([self._refreshing] if self._refreshing is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def refresh(self) -> None:
        """Probe the engines that are not up, now: one round at a time, at most one every ``REFRESH_GAP_S``."""
        if self.tokenizer is None and self._learning.locked():
            async with self._learning:  # an engine has just joined; bounded by its probe's limit
                return
        now = asyncio.get_running_loop().time()
        if self._refreshing is None or self._refreshing.done():
            if self._registry.all_up or now - self._refreshed_at < REFRESH_GAP_S:
                return
            self._refreshed_at = now
            self._refreshing = asyncio.create_task(self._probe_down())
        # Not awaited itself: when ``stop`` ends it, those who wait here go on and answer that nothing is ready.
        await asyncio.wait([self._refreshing])

    async def probe(self, peer: Peer) -> None:
        """Ask one engine how it is, and report it. Never raises."""
        async with peer.lock:
            with LoopLag() as lag:
                try:
                    async with asyncio.timeout(self._settings.timeout_s):
                        info = await peer.client.probe(self._settings.connect_timeout_s)
                    if self._served_model not in (None, info.model, *info.aliases):
                        self._registry.refuse(peer, f"it serves {info.model}, not {self._served_model}")
                    elif self._registry.admit(peer, info):
                        await self._learn(peer, info)
                except TimeoutError:
                    self._timed_out(peer, lag)
                except MicroservingError as error:
                    self._registry.mark_down(peer, error.message)
                except Exception as error:  # the wall: whatever it is about an engine, it is asked again
                    _logger.exception("probing %s failed", peer.label)
                    self._registry.mark_down(peer, f"it cannot be used: {type(error).__name__}")

    async def _probe_down(self) -> None:
        down = [peer for peer in self._registry.peers if peer.state != "up"]
        await asyncio.gather(*map(self.probe, down))

    def _watch(self, peer: Peer) -> None:
        task = asyncio.create_task(self._keep_probing(peer))
        self._tasks[peer] = task
        task.add_done_callback(lambda _: self._tasks.pop(peer, None))

    def _leave(self, peer: Peer) -> None:
        if (task := self._tasks.get(peer)) is not None:
            task.cancel()

    async def _keep_probing(self, peer: Peer) -> None:
        """Every ``interval_s``, and sooner when something is wrong, but not more often than ``REFRESH_GAP_S``: requests
        wait for an engine that was silent once."""
        while True:
            await self.probe(peer)
            peer.suspect.clear()
            if peer.state == "up" and peer.misses:
                peer.suspect.set()
            await asyncio.sleep(min(REFRESH_GAP_S, self._settings.interval_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._settings.interval_s - REFRESH_GAP_S)):
                    await peer.suspect.wait()

    def _timed_out(self, peer: Peer, lag: LoopLag) -> None:
        """It was silent for too long, unless it was us who did not listen."""
        if lag.share < MAX_LAG_SHARE:
            self._missed(peer)
        else:
            _logger.info("a probe of %s does not count: this process is too busy", peer.label)

    def _missed(self, peer: Peer) -> None:
        """No answer in time: it may be busy, until it was too often; then those who wait for it need not any more."""
        peer.misses += 1
        if peer.state != "up":
            self._registry.mark_down(peer, "does not answer")
        elif peer.misses >= self._settings.misses:
            self._registry.mark_down(peer, "does not answer")
            peer.client.give_up("does not answer")

    async def _learn(self, peer: Peer, info: EngineInfo) -> None:
        """Know the model that the engines which are up serve; they all serve the same one."""
        async with self._learning:
            if self.grammars is None or info.model_hash not in ("", self._model_hash):
                self.tokenizer = self.grammars = None
                tokenizer = await self._tokenizer_of(peer)
                grammars = GrammarCompiler(tokenizer)
                await asyncio.to_thread(grammars.prepare)  # now: later it would hold up streams
                self.tokenizer, self.grammars = tokenizer, grammars
                self._model_hash = info.model_hash
            # Meanwhile any of them may have gone down, this one included.
            contexts = [up.client.info.max_context for up in self._registry.up if up.client.info is not None]
            smallest = min([info.max_context, *contexts])
            names = [info.model, *info.aliases]
            own = names[0] if self._served_model is None else self._served_model
            aliases = tuple(name for name in names if name != own)
            self.model = ServedModel(
                own,
                max_context=smallest,
                created=info.created,
                aliases=aliases,
                model_hash=info.model_hash,
            )

    async def _tokenizer_of(self, peer: Peer) -> Tokenizer:
        if not peer.client.verbs_only:
            return await asyncio.to_thread(self._load_tokenizer, await peer.client.fetch_tokenizer())
        if self._local_tokenizer is None:
            raise ModelLoadError("it cannot give its tokenizer: tokenizer_dir must name one")
        return self._local_tokenizer


def _tokenizer_in(directory: Path) -> Tokenizer:
    from microserving.tokenizer.loading import from_directory  # reads model files: few routers need that

    return from_directory(directory)
