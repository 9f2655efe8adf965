"""Which program is in charge: lends it to attempts, swaps it, and goes back when a new one turns out to be broken.

Owns the versions (the one in charge, those kept for a rollback, those that still finish requests) and the ``plan`` of
the one in charge. Does not know requests (``dispatch`` acquires a program for every attempt and says how that ended)
nor how programs are checked (``deployment``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from microserving.errors import ProgramError
from microserving.program import Cluster
from microserving.router.plan import start_plan
from microserving.router.program_loader import LoadedProgram

_logger = logging.getLogger(__name__)
_STOP_S = 5.0
"""How long a plan may take to end once it was cancelled."""

Outcome = Literal["ok", "program_failed", "other"]
"""How a use of a program ended. program_failed: it raised a bug, hung or yielded rubbish; ``other`` is an engine's or a
client's doing."""

VersionState = Literal["in_charge", "kept", "draining"]


@dataclass(frozen=True, slots=True)
class HostSettings:
    """kept: predecessors for rollbacks. drain_timeout_s: requests on an old program that run longer are logged.

    A new program is rolled back when at least rollback_min_failures of its first rollback_window attempts, and at least
    the share rollback_threshold of those that ended so far, failed through its own fault.
    """

    kept: int = 3
    drain_timeout_s: float = 60.0
    rollback_window: int = 20
    rollback_threshold: float = 0.5
    rollback_min_failures: int = 3


@dataclass(slots=True, eq=False)
class Version:
    """One deployment. number: 1 is the program that the configuration names. since: Unix time of its deployment.

    uses: attempts under way. ok, failed: attempts that ended well, or failed through the program.
    """

    number: int
    program: LoadedProgram
    since: float = field(default_factory=time.time)
    uses: int = 0
    ok: int = 0
    failed: int = 0
    drain_timer: asyncio.TimerHandle | None = None

    @property
    def label(self) -> str:
        return f"version {self.number} ({self.program.name})"


@dataclass(frozen=True, slots=True)
class Rollback:
    """A version was taken out of charge. at: Unix time. automatic: because it failed."""

    version: int
    name: str
    back_to: int
    reason: str
    automatic: bool
    at: float


class ProgramHost:
    """cluster: what plans get. on_change: called when another version is in charge; must not raise. The other attributes
    are cumulative counts and the last rollback."""

    def __init__(
        self, program: LoadedProgram, cluster: Cluster, settings: HostSettings | None = None
    ) -> None:
        self.deployments = 0
        self.rollbacks = 0
        self.last_rollback: Rollback | None = None
        self.on_change: Callable[[], None] | None = None
        self._cluster = cluster
        self._settings = settings or HostSettings()
        self._current = Version(1, program)
        self._last_number = 1
        self._history: list[Version] = []  # predecessors, the oldest first
        self._versions = {program: self._current}  # all that are in charge, in history, or in use
        self._plan: asyncio.Task[None] | None = None
        self._ending_plans: set[asyncio.Task[None]] = set()

    @property
    def program(self) -> LoadedProgram:
        """The program in charge."""
        return self._current.program

    @property
    def current(self) -> Version:
        """The version in charge."""
        return self._current

    @property
    def kept(self) -> list[Version]:
        """Those that a rollback can bring back, the oldest first, and the one in charge."""
        return [*self._history, self._current]

    @property
    def last_number(self) -> int:
        """The highest number that a version was given."""
        return self._last_number

    @property
    def uses(self) -> int:
        """How many attempts use a program now."""
        return sum(version.uses for version in self._versions.values())

    @property
    def versions(self) -> list[tuple[Version, VersionState]]:
        """All that are still there, the newest first."""
        newest_first = sorted(self._versions.values(), key=lambda version: -version.number)
        return [(version, self._state(version)) for version in newest_first]

    def resume(self, versions: Sequence[Version], last_number: int) -> None:
        """Take up what an earlier router left, in place of the program given. Call before ``start``.

        versions: as ``kept`` told them, one at least.
        """
        self._history, self._current = list(versions[:-1]), versions[-1]
        self._versions = {version.program: version for version in versions}
        self._last_number = last_number

    def start(self) -> None:
        """Run the program's ``plan``, if it has one."""
        self._plan = start_plan(self.program, self._cluster)

    async def stop(self) -> None:
        """End the plan. Idempotent."""
        self._end_plan()
        for version in self._versions.values():
            _stop_timer(version)
        if self._ending_plans:
            _, clinging = await asyncio.wait(self._ending_plans, timeout=_STOP_S)
            if clinging:
                _logger.warning("the plan of a router program does not end although it was cancelled")

    def acquire(self, *, failed: LoadedProgram | None = None) -> LoadedProgram:
        """The program in charge, for one attempt; must be given back with ``release``.

        failed: the program that failed this very request just now: while it is on trial, its predecessor is lent
        instead.
        """
        version = self._current if failed is None else self._instead_of(failed)
        version.uses += 1
        return version.program

    def has_other_than(self, failed: LoadedProgram) -> bool:
        """Whether ``acquire(failed=failed)`` would now lend another program."""
        return self._instead_of(failed).program is not failed

    def release(self, program: LoadedProgram, outcome: Outcome) -> None:
        """An attempt with ``program`` ended. Once per ``acquire``. May take the program out of charge."""
        version = self._versions[program]
        version.uses -= 1
        if outcome == "ok":
            version.ok += 1
        elif outcome == "program_failed":
            on_trial = self._on_trial(version)
            version.failed += 1
            if on_trial and version is self._current and self._is_broken(version):
                ended = version.ok + version.failed
                self._roll_back(f"{version.failed} of its first {ended} attempts failed", automatic=True)
        self._forget_unused(version)

    def switch(self, program: LoadedProgram) -> Version:
        """Put ``program`` in charge of all attempts from now on; those that run finish on what they began with."""
        old = self._current
        self._last_number += 1
        self.deployments += 1
        self._history.append(old)
        self._take_charge(Version(self._last_number, program))
        _logger.info("%s is in charge instead of %s", self._current.label, old.label)
        while len(self._history) > self._settings.kept:
            self._forget_unused(self._history.pop(0))
        self._drain(old)
        self._changed()
        return self._current

    def roll_back(self) -> Version:
        """Put the predecessor in charge again. Raises ProgramError when there is none."""
        if not self._history:
            raise ProgramError("there is no earlier program to go back to")
        return self._roll_back("asked for", automatic=False)

    def _roll_back(self, reason: str, *, automatic: bool) -> Version:
        old = self._current
        self.rollbacks += 1
        self._take_charge(self._history.pop())
        back_to = self._current
        self.last_rollback = Rollback(
            old.number, old.program.name, back_to.number, reason, automatic, time.time()
        )
        level = logging.ERROR if automatic else logging.INFO
        _logger.log(level, "%s was rolled back to %s: %s", old.label, back_to.label, reason)
        self._drain(old)
        self._changed()
        return back_to

    def _take_charge(self, version: Version) -> None:
        """The one place where the reference is switched."""
        self._end_plan()
        _stop_timer(version)
        self._current = self._versions[version.program] = version
        self.start()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _end_plan(self) -> None:
        if self._plan is not None and not self._plan.done():
            self._plan.cancel()
            self._ending_plans.add(self._plan)
            self._plan.add_done_callback(self._ending_plans.discard)
        self._plan = None

    def _instead_of(self, failed: LoadedProgram) -> Version:
        chain = [*self._history, self._current]
        for older, version in pairwise(chain):
            if version.program is failed and self._on_trial(version):
                return older
        return self._current

    def _on_trial(self, version: Version) -> bool:
        """Whether it has not yet shown what it is worth; the first program has nothing to be compared with."""
        return version.number > 1 and version.ok + version.failed < self._settings.rollback_window

    def _is_broken(self, version: Version) -> bool:
        enough = version.failed >= self._settings.rollback_min_failures
        share = version.failed / (version.ok + version.failed)
        return enough and share >= self._settings.rollback_threshold and bool(self._history)

    def _state(self, version: Version) -> VersionState:
        if version is self._current:
            return "in_charge"
        return "draining" if version.uses else "kept"

    def _drain(self, version: Version) -> None:
        """``version`` gets no more attempts."""
        if version.uses:
            loop = asyncio.get_running_loop()
            timeout_s = self._settings.drain_timeout_s
            version.drain_timer = loop.call_later(timeout_s, _report_slow_drain, version, timeout_s)
        self._forget_unused(version)

    def _forget_unused(self, version: Version) -> None:
        """Keep nothing of a version that nobody uses and no rollback can bring back."""
        if version is self._current or version.uses:
            return
        _stop_timer(version)
        if version not in self._history and self._versions.pop(version.program, None) is not None:
            version.program.unload()


def _stop_timer(version: Version) -> None:
    if version.drain_timer is not None:
        version.drain_timer.cancel()
        version.drain_timer = None


def _report_slow_drain(version: Version, waited_s: float) -> None:
    version.drain_timer = None
    _logger.warning(
        "%s was replaced %g s ago and still serves %d attempts", version.label, waited_s, version.uses
    )
