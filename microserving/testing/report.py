"""What the kit found, in words: every finding names the fault, the await and the line of the program.

Plain data and text; decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from microserving.testing.faults import WHAT, Fault, Moment

FindingKind = Literal["leak", "counter", "tokens", "ending", "error", "bug", "cancel", "hang", "runaway"]
"""leak: something is held, or runs, after all requests ended. counter: one does not return. tokens: wrong, missing or
twice. ending: none or two. error: a client sees one although another engine of the role lived. bug: the program raised,
or broke the rules. cancel: it went on without its client. hang: a request did not end. runaway: verbs without bound."""

_MORE = 3
"""So many places of the same finding are told in full."""


@dataclass(frozen=True, slots=True)
class Finding:
    """message: what is wrong; runs with the same one are told together."""

    kind: FindingKind
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """One run. scene: which requests on which engines. met: what went wrong, and when. virtual_s: how long it took."""

    scene: str
    met: tuple[tuple[Moment, Fault], ...]
    findings: tuple[Finding, ...]
    virtual_s: float

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(slots=True)
class Report:
    """Of one program. awaits: what it awaited in the runs without a fault. wall_s: how long all of it took."""

    program: str
    path: Path
    awaits: list[Moment] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def ok(self) -> bool:
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def findings(self) -> list[tuple[Finding, Verdict]]:
        """Every finding of every run."""
        return [(finding, verdict) for verdict in self.verdicts for finding in verdict.findings]

    @property
    def kinds(self) -> set[FindingKind]:
        return {finding.kind for finding, _ in self.findings}

    def place(self, moment: Moment) -> str:
        """``mine.py:12 (prep_recv on decode-0)``."""
        line = "" if moment.line is None else f":{moment.line}"
        return f"{self.path.name}{line} ({moment.what} on {moment.engine})"

    def __str__(self) -> str:
        """Some lines for a terminal."""
        return "\n".join([self._head(), *self._table(), *self._told()])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = [
            asdict(finding)
            | {
                "scene": verdict.scene,
                "faults": [{"fault": fault, **asdict(moment)} for moment, fault in verdict.met],
            }
            for finding, verdict in self.findings
        ]
        return {
            "program": self.program,
            "ok": self.ok,
            "runs": len(self.verdicts),
            "awaits": [asdict(moment) for moment in self.awaits],
            "findings": found,
        }

    def _head(self) -> str:
        virtual = sum(verdict.virtual_s for verdict in self.verdicts)
        count = len(self._grouped())
        what = "sound" if self.ok else f"not sound, {count} problem{'s' * (count > 1)}"
        return (
            f"{self.program}: {what} ({len(self.verdicts)} runs, {virtual / 60:.0f} min of virtual time in "
            f"{self.wall_s:.1f} s)"
        )

    def _table(self) -> list[str]:
        """For each await of the program how many runs had something go wrong there, and how many of them went badly."""
        runs: Counter[tuple[int | None, str]] = Counter()
        bad: Counter[tuple[int | None, str]] = Counter()
        for verdict in self.verdicts:
            for key in {(moment.line, moment.verb) for moment, _ in verdict.met}:
                runs[key] += 1
                bad[key] += not verdict.ok
        rows = dict.fromkeys((moment.line, moment.verb) for moment in self.awaits)
        return [
            f"  {self.path.name}:{'?' if line is None else line:<5}{_shown(verb):<18}{runs[line, verb]:>5} runs   "
            + (f"{bad[line, verb]} not sound" if bad[line, verb] else "ok")
            for line, verb in rows
        ]

    def _grouped(self) -> dict[Finding, list[Verdict]]:
        groups: dict[Finding, list[Verdict]] = {}
        for finding, verdict in self.findings:
            groups.setdefault(finding, []).append(verdict)
        return groups

    def _told(self) -> list[str]:
        lines = []
        for finding, verdicts in self._grouped().items():
            lines += ["", f"  {finding.kind}: {finding.message}"]
            distinct = list(dict.fromkeys(self.when(verdict) for verdict in verdicts))
            lines += [f"    {when}" for when in distinct[:_MORE]]
            if len(distinct) > _MORE:
                lines.append(f"    and in {len(verdicts) - _MORE} more runs")
        return lines

    def when(self, verdict: Verdict) -> str:
        """What went wrong in that run, and where, in words."""
        if not verdict.met:
            return f"without any fault ({verdict.scene})"
        return ", and ".join(self._met(verdict.met)) + f" ({verdict.scene})"

    def _met(self, met: Sequence[tuple[Moment, Fault]]) -> list[str]:
        return [f"when {WHAT[fault]}, at {self.place(moment)}" for moment, fault in met]


def _shown(verb: str) -> str:
    return "next token" if verb == "chunk" else verb
