"""Which engines there are, which of them are up, and that those which are up fit together.

Owns the members, the state of each, and the pools that programs choose from. ``health`` finds the facts by probing and
reports them here; connection failures are reported by the engine clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from microserving.errors import ConfigError
from microserving.program import Cluster, EngineClient, EngineRole
from microserving.protocol.microserving import EngineInfo
from microserving.router.circuit import Circuit, CircuitSettings
from microserving.router.config import peer_url
from microserving.router.engine_client import EngineTimeouts, HttpEngineClient
from microserving.router.fitness import conflict, out_of_reach
from microserving.router.in_flight import InFlight

_logger = logging.getLogger(__name__)

State = Literal["unknown", "up", "down", "refused"]
Status = Literal["unknown", "up", "down", "refused", "draining", "drained", "tripped"]

_GIVEN_UP_S = 10.0
"""How long the requests of an engine that was given up may take to leave it."""


@dataclass(slots=True, eq=False)
class Peer:
    """One member. state: ``unknown`` until the first answer; ``refused`` when it does not fit the others.

    reason: why it is not up, for operators. draining: it gets no new requests. undrained: how often that was taken back.
    misses: probes in a row without an answer. suspect: something went wrong with it, which asks for a probe before its
    time. lock: held by its probe.
    """

    client: HttpEngineClient
    circuit: Circuit
    state: State = "unknown"
    reason: str = "not asked yet"
    draining: bool = False
    undrained: int = 0
    misses: int = 0
    suspect: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def label(self) -> str:
        return f"{self.client.role} engine {self.client.url}"

    @property
    def status(self) -> Status:
        """``state``, but an engine that is up may be kept out of its pools all the same."""
        if self.state != "up":
            return self.state
        if self.draining:
            return "draining" if self.client.in_flight else "drained"
        return "up" if self.circuit.closed else "tripped"


class EngineRegistry:
    """The members, in a stable order: prefill peers first, as configured, then those that were added. A URL in both
    lists is one engine.

    drain_timeout_s: requests that are longer on an engine that is drained go on elsewhere. on_added, on_removed: who
    probes the members; called on every change.
    """

    def __init__(
        self,
        prefill_peers: Sequence[str],
        decode_peers: Sequence[str],
        timeouts: EngineTimeouts,
        circuit: CircuitSettings | None = None,
        *,
        drain_timeout_s: float = 30.0,
    ) -> None:
        self.in_flight: InFlight = InFlight()
        self.on_added: Callable[[Peer], None] | None = None
        self.on_removed: Callable[[Peer], None] | None = None
        self.peers: list[Peer] = []
        self._timeouts = timeouts
        self._circuit = circuit or CircuitSettings()
        self._drain_timeout_s = drain_timeout_s
        self._numbers = 0
        self._live: dict[EngineRole | Literal["all"], tuple[EngineClient, ...]] = {}
        self._failing: set[EngineClient] = set()
        self._tripped: dict[EngineClient, Peer] = {}
        self.cluster = Cluster(
            prefill=lambda: self._pool("prefill"),
            decode=lambda: self._pool("decode"),
            all=lambda: self._pool("all"),
            set_role=self.set_role,
        )
        for url in dict.fromkeys([*prefill_peers, *decode_peers]):
            self._join(url, _role(url, prefill_peers, decode_peers))
        self._update()

    @property
    def up(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.state == "up"]

    @property
    def all_up(self) -> bool:
        return all(peer.state == "up" for peer in self.peers)

    @property
    def serving(self) -> bool:
        """Whether a new request may find an engine."""
        return bool(self._live["all"])

    # Membership

    def find(self, which: str) -> Peer:
        """The member with this node id, or at this URL. Raises ConfigError when there is none."""
        for peer in self.peers:
            if which in (peer.client.id, peer.client.url):
                return peer
        raise ConfigError(f"there is no engine {which!r}")

    def add(self, url: str, role: EngineRole) -> Peer:
        """Take a new member in; it gets requests from its first good probe on. Raises ConfigError when it is one."""
        try:
            address = peer_url(url)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if any(peer.client.url == address for peer in self.peers):
            raise ConfigError(f"{address} is an engine of this router already")
        peer = self._join(address, role)
        _logger.info("%s was added", peer.label)
        if self.on_added is not None:
            self.on_added(peer)
        return peer

    async def remove(self, which: str, *, drain: bool = True) -> None:
        """Let a member go: drained first, or at once, when its requests go on elsewhere.

        Returns when nothing is on it any more. Raises ConfigError when there is no such member; as ``drain``, too, and
        then it stays.
        """
        peer = self.find(which)
        await self.drain(which, timeout_s=None if drain else 0.0)
        if peer not in self.peers:
            return  # somebody else removed it meanwhile
        self.peers.remove(peer)
        self._rehabilitate(peer)
        self.cluster.forget(peer.client.id)
        self._update()
        if self.on_removed is not None:
            self.on_removed(peer)
        await peer.client.close()
        _logger.info("%s was removed", peer.label)

    async def drain(self, which: str, *, timeout_s: float | None = None) -> None:
        """Give a member no new requests, and wait until those that run have ended.

        timeout_s: those that take longer (None: than the registry's limit) are ended here, and go on elsewhere. Raises
        ConfigError when the member was given requests again meanwhile (``undrain``): they stay where they are.
        """
        peer = self.find(which)
        client, undrained = peer.client, peer.undrained
        if not peer.draining:
            _logger.info("%s is drained", peer.label)
        peer.draining = True
        self._update()
        first_s = self._drain_timeout_s if timeout_s is None else timeout_s
        for limit_s in (first_s, _GIVEN_UP_S):
            idle = await self.in_flight.until_idle(client, limit_s)
            if peer.undrained != undrained:
                raise ConfigError(f"{peer.label} was given requests again meanwhile")
            if idle:
                return
            client.give_up("is being drained")

    def undrain(self, which: str) -> None:
        """Give a member requests again."""
        peer = self.find(which)
        peer.draining = False
        peer.undrained += 1
        peer.client.came_back()
        self._update()

    async def set_role(self, which: str, role: EngineRole) -> None:
        """Offer a member for another role from now on; what runs on it goes on. Raises ConfigError."""
        peer = self.find(which)
        if peer.client.role != role:
            _logger.info("%s is a %s engine from now on", peer.label, role)
        peer.client.role = role
        self._update()

    # What probes and requests find out

    def admit(self, peer: Peer, info: EngineInfo) -> bool:
        """The engine answered and is ready. False: it was refused, because it does not fit those that are up."""
        peer.misses = 0
        others = {up.label: up.client.info for up in self.up if up is not peer and up.client.info is not None}
        if (reason := conflict(info, others)) is not None:
            self.refuse(peer, reason)
            return False
        known = peer.client.info
        if peer.state != "up":
            restarted = known is not None and known.epoch != info.epoch
            _logger.info(
                "%s is %s as %s", peer.label, "back, restarted," if restarted else "up", info.engine_id
            )
        if peer.state != "up" or known is None or known.epoch != info.epoch:
            self._rehabilitate(peer)
            if far := out_of_reach(info, others.values()):
                _logger.warning("%s and %s cannot hand KV to each other: %s", peer.label, *far)
        if known is not None and known.epoch != info.epoch:
            self.cluster.forget(known.engine_id)
        if known is None or known.engine_id != info.engine_id:
            self._take_id_from_others(info.engine_id)
        if not peer.draining:
            peer.client.came_back()
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

    def suspect(self, engine: EngineClient) -> None:
        """A request failed on ``engine`` in a way that a probe should look into."""
        for peer in self.peers:
            if peer.client is engine and peer.state == "up":
                peer.suspect.set()

    def _join(self, url: str, role: EngineRole) -> Peer:
        client = HttpEngineClient(
            url,
            role,
            timeouts=self._timeouts,
            in_flight=self.in_flight,
            on_unreachable=self._unreachable,
            on_outcome=self._outcome,
            number=self._numbers,
        )
        self._numbers += 1
        peer = Peer(client, Circuit(self._circuit))
        self.peers.append(peer)
        return peer

    def _take_id_from_others(self, engine_id: str) -> None:
        """An engine that moved to another address is not found at its old one any more: who was there is down."""
        for peer in self.peers:
            if peer.client.info is not None and peer.client.info.engine_id == engine_id:
                self.cluster.forget(engine_id)
                peer.client.info = None

    def _rehabilitate(self, peer: Peer) -> None:
        """It was away, or is another process: its failures do not count any more."""
        peer.circuit.reset()
        self._tripped.pop(peer.client, None)
        self._failing.discard(peer.client)

    def _unreachable(self, client: HttpEngineClient, reason: str) -> None:
        for peer in self.peers:
            if peer.client is client and peer.state == "up":
                self.mark_down(peer, reason)
                peer.suspect.set()

    def _outcome(self, client: HttpEngineClient, answered: bool) -> None:
        """A verb ended. Called for each, so what changes nothing costs nothing."""
        if answered and client not in self._failing:
            return
        for peer in self.peers:
            if peer.client is client:
                self._judge(peer, answered)

    def _judge(self, peer: Peer, answered: bool) -> None:
        if answered:
            self._failing.discard(peer.client)
            if peer.circuit.succeeded():
                self._tripped.pop(peer.client, None)
                _logger.info("%s serves again", peer.label)
            return
        self._failing.add(peer.client)
        if peer.circuit.failed(asyncio.get_running_loop().time()):
            if peer.client not in self._tripped:
                _logger.warning("%s fails request after request: it is tried now and then", peer.label)
            self._tripped[peer.client] = peer
            peer.suspect.set()

    def _pool(self, name: EngineRole | Literal["all"]) -> tuple[EngineClient, ...]:
        live = self._live[name]
        return tuple(filter(self._admits, live)) if self._tripped else live

    def _admits(self, engine: EngineClient) -> bool:
        peer = self._tripped.get(engine)
        if peer is None:
            return True
        half_open = peer.circuit.state(asyncio.get_running_loop().time()) == "half_open"
        return half_open and engine not in self.in_flight

    def _set(self, peer: Peer, state: State, reason: str) -> None:
        peer.state, peer.reason = state, reason
        self._update()

    def _update(self) -> None:
        up = [peer.client for peer in self.up if not peer.draining]
        self._live = {
            "prefill": tuple(client for client in up if client.role != "decode"),
            "decode": tuple(client for client in up if client.role != "prefill"),
            "all": tuple(up),
        }


def _role(url: str, prefill_peers: Iterable[str], decode_peers: Iterable[str]) -> EngineRole:
    if url in prefill_peers and url in decode_peers:
        return "hybrid"
    return "prefill" if url in prefill_peers else "decode"


def check_startup(peers: Sequence[Peer], waited_s: float) -> None:
    """Raises ConfigError, one line, when a peer is refused or did not answer."""
    for peer in peers:
        if peer.state == "refused":
            raise ConfigError(f"{peer.label} cannot be used: {peer.reason}")
    missing = [f"{peer.label} ({peer.reason})" for peer in peers if peer.state != "up"]
    if missing:
        raise ConfigError(f"no answer within {waited_s:g} s from {', '.join(missing)}")
