"""What can go wrong at an await of a program, and when: the moments of a run and the faults that are planned for them.

Plain data, and the ``Stage`` on which engines note every moment. Does not know what a fault does to an engine
(``engines``) nor which ones are tried (``check``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Fault = Literal[
    "refused",
    "exhausted",
    "broken",
    "dies",
    "frozen",
    "slow",
    "silent",
    "transfer_fails",
    "lease_lost",
    "preempted",
    "all_exhausted",
    "all_die",
    "client_leaves",
    "client_closes",
]

WHAT: Mapping[Fault, str] = {
    "refused": "it is refused",
    "exhausted": "the engine has no KV pages left",
    "broken": "the connection breaks before the answer",
    "dies": "the engine dies",
    "frozen": "the engine stops, until the health probes give it up",
    "slow": "the answer is late",
    "silent": "no answer comes, until the request's deadline",
    "transfer_fails": "the transfer fails",
    "lease_lost": "the reservation is gone",
    "preempted": "the engine gives the generation back",
    "all_exhausted": "from here on no engine has KV pages left",
    "all_die": "all engines die",
    "client_leaves": "the client leaves",
    "client_closes": "the client closes the stream after the next chunk",
}
"""Every fault, as a report says it."""

ENGINE_FAULTS: tuple[Fault, ...] = tuple(fault for fault in WHAT if not fault.startswith("client_"))
CLIENT_FAULTS: tuple[Fault, ...] = ("client_leaves", "client_closes")

_ONLY_AT: Mapping[Fault, frozenset[str]] = {
    "refused": frozenset({"prep_recv", "remote_send", "start_generate", "commit", "match_prefix", "abort"}),
    "exhausted": frozenset({"prep_recv", "remote_send", "start_generate", "chunk"}),
    "transfer_fails": frozenset({"remote_send", "start_generate"}),
    "lease_lost": frozenset({"remote_send", "start_generate", "commit"}),
    "preempted": frozenset({"chunk"}),
    "all_exhausted": frozenset({"prep_recv", "remote_send", "start_generate"}),
    "client_closes": frozenset({"chunk"}),
}


@dataclass(frozen=True, slots=True)
class Moment:
    """One await of the program on an engine: a verb, or (verb ``chunk``) the next token of a stream.

    number: from 0, in the order of the run. line: of the program's file; None when the program's own text does not show.
    at: virtual seconds. detail: which token.
    """

    number: int
    engine: str
    verb: str
    request_id: str
    line: int | None
    at: float
    detail: str = ""

    @property
    def what(self) -> str:
        """``prep_recv``, ``token 3``."""
        return self.detail or self.verb


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """``fault`` is to happen at the moment with this number."""

    number: int
    fault: Fault


def may_happen(fault: Fault, moment: Moment) -> bool:
    """Whether an engine, or a client, can do that then."""
    return moment.verb in _ONLY_AT.get(fault, {moment.verb})


@dataclass(slots=True)
class Stage:
    """Where the engines of one run note their moments. plan: number -> fault.

    call_limit: so many verbs are more than any program needs; ``runaway`` is set then. line_of: tells the program's line
    at this very moment. on_moment, on_fault: called with each one, and with those that a fault meets.
    """

    plan: Mapping[int, Fault] = field(default_factory=dict)
    call_limit: int = 1000
    line_of: Callable[[str], int | None] = lambda _request_id: None
    on_moment: Callable[[Moment], None] = lambda _moment: None
    on_fault: Callable[[Moment, Fault], None] = lambda _moment, _fault: None
    moments: list[Moment] = field(default_factory=list)
    met: list[tuple[Moment, Fault]] = field(default_factory=list)
    calls: int = 0
    runaway: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self, engine: str, verb: str, request_id: str, detail: str = "") -> Fault | None:
        """A moment: returns what goes wrong in it."""
        now = asyncio.get_running_loop().time()
        number = len(self.moments)
        moment = Moment(number, engine, verb, request_id, self.line_of(request_id), now, detail)
        self.moments.append(moment)
        self.calls += verb != "chunk"
        if self.calls > self.call_limit:
            self.runaway.set()
        self.on_moment(moment)
        fault = self.plan.get(number)
        if fault is not None and may_happen(fault, moment):
            self.met.append((moment, fault))
            self.on_fault(moment, fault)
            return fault
        return None
