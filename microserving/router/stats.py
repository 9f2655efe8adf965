"""What a router tells of itself: `/router/stats` and the figures of `/metrics`.

Reads the parts; owns nothing but how requests ended, and the histograms of generations that did.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Final

from pydantic import BaseModel

from microserving.observability import metrics as names
from microserving.observability.metrics import Figures, Histogram
from microserving.program import EngineLoad, EngineRole, setting_types
from microserving.router.admission import LEVELS, Admission, LoadLevel
from microserving.router.config import Setting
from microserving.router.dispatch import Dispatcher
from microserving.router.engine_registry import EngineRegistry, Peer, Status
from microserving.router.ledger import RequestRecord
from microserving.router.program_host import ProgramHost

_LEVELS: Final = (*(level for _, level in LEVELS), "critical")
_STATES: Final = ("waiting_for_prefill", "handoff_to_decode", "decoding")


class ProgramStats(BaseModel):
    """version: 1 is the program that the router started with. rollbacks: automatic ones too, since then."""

    name: str
    settings: dict[str, Setting]
    version: int
    rollbacks: int


class EngineStats(BaseModel):
    """id: the node id, unknown until the engine was reached. address: only when it was asked for."""

    id: str | None
    role: EngineRole
    state: Status
    in_flight: int
    load: EngineLoad
    address: str | None = None


class AdmissionStats(BaseModel):
    """load: share of the capacity in use. queued, refused: since the router started."""

    level: LoadLevel
    load: float
    in_flight: int
    waiting: int
    queued: int
    refused: int


class TransferStats(BaseModel):
    """What `remote_send` did for the requests that ended, since the router started. Times are sums, in milliseconds:
    transfer_ms of the writing, exposed_ms of what the transfer delayed the answers."""

    hand_offs: int
    tokens_sent: int
    bytes_sent: int
    prefill_ms: float
    transfer_ms: float
    exposed_ms: float


class RouterStats(BaseModel):
    """GET `/router/stats`. requests_in_flight: attempts under way. states: of the requests that run."""

    program: ProgramStats
    requests_in_flight: int
    admission: AdmissionStats
    states: dict[str, int]
    transfers: TransferStats
    engines: list[EngineStats]


class RouterFigures:
    """Whoever asks gets what holds now."""

    def __init__(
        self, registry: EngineRegistry, host: ProgramHost, dispatcher: Dispatcher, admission: Admission
    ) -> None:
        self._registry = registry
        self._host = host
        self._dispatcher = dispatcher
        self._admission = admission
        self._requests: Counter[str] = Counter()
        self._ttft = Histogram(names.TTFT_BUCKETS)
        self._duration = Histogram(names.DURATION_BUCKETS)

    def request_ended(self, outcome: str) -> None:
        """A client's request ended: ``FrontSettings.on_ended``."""
        self._requests[outcome] += 1

    def ended(self, record: RequestRecord) -> None:
        """A generation ended: ``Ledger.on_ended``."""
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
        if record.duration_s is not None:
            self._duration.observe(record.duration_s)

    def stats(self, *, addresses: bool) -> RouterStats:
        program = self._host.program
        settings = {
            name: _shown(getattr(program.instance, name)) for name in setting_types(type(program.instance))
        }
        admission = self._admission
        return RouterStats(
            program=ProgramStats(
                name=program.name,
                settings=settings,
                version=self._host.current.number,
                rollbacks=self._host.rollbacks,
            ),
            requests_in_flight=self._dispatcher.running,
            admission=AdmissionStats(
                level=admission.level,
                load=admission.load,
                in_flight=admission.admitted,
                waiting=admission.waiting,
                queued=admission.queued,
                refused=admission.refused,
            ),
            states={str(state): number for state, number in self._dispatcher.ledger.states.items()},
            transfers=TransferStats(**dataclasses.asdict(self._dispatcher.ledger.totals.transfers)),
            engines=[_engine_stats(peer, addresses) for peer in self._registry.peers],
        )

    def figures(self) -> Figures:
        """For ``Exposition``."""
        figures, ledger, admission = Figures(), self._dispatcher.ledger, self._admission
        totals, states = ledger.totals, ledger.states
        figures.put(names.ROUTER_TTFT_SECONDS, self._ttft.copy())
        figures.put(names.ROUTER_REQUEST_SECONDS, self._duration.copy())
        figures.put_all(names.ROUTER_REQUESTS, self._requests)
        figures.put_all(names.ROUTER_GENERATIONS, totals.outcomes)
        figures.put_all(names.ROUTER_GENERATIONS_RUNNING, {state: states[state] for state in _STATES})
        figures.put(names.ROUTER_RETRIES, totals.retries)
        figures.put(names.ROUTER_RESUMES, totals.resumes)
        figures.put(names.ROUTER_HEDGES, totals.hedges)
        figures.put(names.ROUTER_OUTPUT_TOKENS, totals.output_tokens)
        figures.put(names.ROUTER_QUEUED, admission.queued)
        figures.put(names.ROUTER_REFUSED, admission.refused)
        figures.put(names.ROUTER_WAITING, admission.waiting)
        figures.put_all(
            names.ROUTER_LOAD_LEVEL, {level: float(level == admission.level) for level in _LEVELS}
        )
        figures.put(names.ROUTER_PROGRAM_VERSION, self._host.current.number)
        figures.put(names.ROUTER_ROLLBACKS, self._host.rollbacks)
        self._put_engines(figures)
        return figures

    def _put_engines(self, figures: Figures) -> None:
        """Engines that were not reached so far have no id: they are told of together, as nothing may be told twice."""
        up: Counter[tuple[str, EngineRole]] = Counter()
        requests: Counter[tuple[str, EngineRole]] = Counter()
        for peer in self._registry.peers:
            engine = peer.client.info.engine_id if peer.client.info is not None else "unknown"
            labels = engine, peer.client.role
            up[labels] += peer.status == "up"
            requests[labels] += peer.client.in_flight
        for labels in up:
            figures.put(names.ROUTER_ENGINE_UP, up[labels], *labels)
            figures.put(names.ROUTER_ENGINE_REQUESTS, requests[labels], *labels)


def _engine_stats(peer: Peer, address: bool) -> EngineStats:
    client = peer.client
    return EngineStats(
        id=None if client.info is None else client.info.engine_id,
        role=client.role,
        state=peer.status,
        in_flight=client.in_flight,
        load=client.load,
        address=client.url if address else None,
    )


def _shown(value: object) -> Setting:
    return value if isinstance(value, Setting) else repr(value)
