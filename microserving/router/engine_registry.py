"""Which engines there are, which of them are up, and that those which are up fit together.

Owns the state of every peer and the pools that programs choose from. ``health`` finds the facts by probing and
reports them here; connection failures are reported by the engine clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from microserving.errors import ConfigError
from microserving.program import Cluster, EngineClient, EngineRole
from microserving.protocol.microserving import EngineInfo
from microserving.router.engine_client import EngineTimeouts, HttpEngineClient, InFlight

_logger = logging.getLogger(__name__)

State = Literal["unknown", "up", "down", "refused"]

_LAYOUT_FIELDS = ("kv_layout_hash", "kv_bytes_per_token", "page_size")


@dataclass(slots=True, eq=False)
class Peer:
    """One configured engine. state: ``unknown`` until the first answer; ``refused`` when it does not fit the others.

    reason: why it is not up, for operators. misses: probes in a row without an answer. suspect: a connection to it
    was lost, which asks for a probe before its time.
    """

    client: HttpEngineClient
    state: State = "unknown"
    reason: str = "not asked yet"
    misses: int = 0
    suspect: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def label(self) -> str:
        return f"{self.client.role} engine {self.client.url}"


class EngineRegistry:
    """The configured peers, in a stable order: prefill peers first, as configured. A URL in both lists is one engine."""

    def __init__(
        self, prefill_peers: Sequence[str], decode_peers: Sequence[str], timeouts: EngineTimeouts
    ) -> None:
        self.in_flight: InFlight = InFlight()
        self.peers = tuple(
            Peer(self._client(url, _role(url, prefill_peers, decode_peers), timeouts))
            for url in dict.fromkeys([*prefill_peers, *decode_peers])
        )
        self._live: dict[EngineRole | Literal["all"], tuple[EngineClient, ...]] = {}
        self._update()
        self.cluster = Cluster(
            prefill=lambda: self._live["prefill"],
            decode=lambda: self._live["decode"],
            all=lambda: self._live["all"],
        )

    @property
    def up(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.state == "up"]

    @property
    def all_up(self) -> bool:
        return all(peer.state == "up" for peer in self.peers)

    def admit(self, peer: Peer, info: EngineInfo) -> bool:
        """The engine answered and is ready. False: it was refused, because it does not fit those that are up."""
        peer.misses = 0
        others = [other for other in self.up if other is not peer]
        if (conflict := _conflict(info, others)) is not None:
            self.refuse(peer, conflict)
            return False
        known = peer.client.info
        if peer.state != "up":
            restarted = known is not None and known.epoch != info.epoch
            _logger.info(
                "%s is %s as %s", peer.label, "back, restarted," if restarted else "up", info.engine_id
            )
        peer.client.identify(info)
        self._set(peer, "up", "")
        return True

    def refuse(self, peer: Peer, reason: str) -> None:
        """Keep the engine out until it has changed."""
        if peer.state != "refused" or peer.reason != reason:
            _logger.error("%s is refused: %s", peer.label, reason)
        self._set(peer, "refused", reason)

    def mark_down(self, peer: Peer, reason: str) -> None:
        """Keep the engine out until the next probe that it answers."""
        if peer.state == "up":
            _logger.warning("%s is down: %s", peer.label, reason)
        self._set(peer, "down", reason)

    async def close(self) -> None:
        """Idempotent."""
        for peer in self.peers:
            await peer.client.close()

    def _client(self, url: str, role: EngineRole, timeouts: EngineTimeouts) -> HttpEngineClient:
        return HttpEngineClient(
            url, role, timeouts=timeouts, in_flight=self.in_flight, on_unreachable=self._unreachable
        )

    def _unreachable(self, client: HttpEngineClient, reason: str) -> None:
        for peer in self.peers:
            if peer.client is client and peer.state == "up":
                self.mark_down(peer, reason)
                peer.suspect.set()

    def _set(self, peer: Peer, state: State, reason: str) -> None:
        peer.state, peer.reason = state, reason
        self._update()

    def _update(self) -> None:
        up = [peer.client for peer in self.up]
        self._live = {
            "prefill": tuple(client for client in up if client.role != "decode"),
            "decode": tuple(client for client in up if client.role != "prefill"),
            "all": tuple(up),
        }


def _role(url: str, prefill_peers: Iterable[str], decode_peers: Iterable[str]) -> EngineRole:
    if url in prefill_peers and url in decode_peers:
        return "hybrid"
    return "prefill" if url in prefill_peers else "decode"


def _conflict(info: EngineInfo, others: Sequence[Peer]) -> str | None:
    """Why an engine cannot work with the others: both values of what differs. None when it can."""
    for other in others:
        known = other.client.info
        if known is None:
            continue
        if known.engine_id == info.engine_id:
            return f"its node id {info.engine_id!r} is that of {other.label} too"
        fields = ("protocol_version", "model_hash", *_LAYOUT_FIELDS)
        differences = [
            f"{name} {getattr(info, name)} vs {getattr(known, name)}"
            for name in fields
            if getattr(info, name) != getattr(known, name)
        ]
        if differences:
            return f"{info.engine_id} does not fit {known.engine_id}: {', '.join(differences)}"
    return None


def check_startup(peers: Sequence[Peer], waited_s: float) -> None:
    """Raises ConfigError, one line, when a peer is refused or did not answer."""
    for peer in peers:
        if peer.state == "refused":
            raise ConfigError(f"{peer.label} cannot be used: {peer.reason}")
    missing = [f"{peer.label} ({peer.reason})" for peer in peers if peer.state != "up"]
    if missing:
        raise ConfigError(f"no answer within {waited_s:g} s from {', '.join(missing)}")
