"""Results as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from microserving.bench.report import Report, RunData, latency

Row = Sequence[str]
_SHOWN = (
    ("ttft", "TTFT, from the time it was due"),
    ("ttft_from_sent", "TTFT, from the time it was sent"),
    ("tpot", "TPOT"),
    ("itl", "ITL"),
    ("jct", "JCT, from the time it was due"),
    ("jct_from_sent", "JCT, from the time it was sent"),
    ("queueing", "sent later than due"),
)
FIGURES = ("mean", "p50", "p90", "p99", "max")
_HEAD = (
    "PATTERN",
    "LOAD",
    "OK",
    "TTFT mean",
    "p99",
    "TPOT mean",
    "p99",
    "JCT mean",
    "p99",
    "TOK/S",
    "GOODPUT",
    "KV SENT",
)


def table(report: Report) -> str:
    """A line for each run; of a single run everything; what did not go as it should."""
    runs: list[RunData] = sorted(report["runs"], key=lambda run: (run["rate"] or 0.0, run["began_at"]))
    if not runs:
        return "nothing was measured\n"
    parts = [aligned([_HEAD, *(_row(run, report.get("slo") is not None) for run in runs)])]
    if len(runs) == 1:
        parts.append(details(runs[0]))
    notes = [note for run in runs for note in notes_on(run)]
    if report.get("error"):
        notes.append(f"ended early: {report['error']}")
    if notes:
        parts.append("".join(f"{note}\n" for note in notes))
    return "\n".join(parts)


def details(run: RunData) -> str:
    """All latencies of a run, and of each phase of its workload."""
    return aligned([("", *(figure.upper() for figure in FIGURES)), *latency_rows(run)])


def latency_rows(run: RunData) -> list[Row]:
    """Of ``details``: a title, then ``FIGURES``."""
    rows: list[Row] = [
        (title, *(shown_s(latency(run, name, figure)) for figure in FIGURES)) for name, title in _SHOWN
    ]
    for phase, latencies in run["summary"]["phases"].items():
        for name in ("ttft", "tpot", "jct"):
            figures = (
                shown_s(latencies[name][figure] if latencies[name]["count"] else None) for figure in FIGURES
            )
            rows.append((f"{phase}: {name.upper()}", *figures))
    return rows


def notes_on(run: RunData) -> list[str]:
    """What a reader of the figures must know."""
    name, summary = f"{run['label']}, {run['load']}", run["summary"]
    notes = [f"{name}: {count} failed: {kind}" for kind, count in summary["errors"].items()]
    if run.get("disturbance"):
        notes.append(f"{name}: WRONG: {run['disturbance']}")
    if summary["interrupted"]:
        notes.append(
            f"{name}: {summary['interrupted']} of {summary['requests']} had not ended when the run did; they are not in the "
            "latencies, which look better for it"
        )
    if summary["no_usage"]:
        notes.append(
            f"{name}: the server told no token counts for {summary['no_usage']}; chunks were counted"
        )
    if summary["disagreeing"]:
        notes.append(f"{name}: the server counted fewer tokens than it sent in {summary['disagreeing']}")
    late = latency(run, "queueing", "p99")
    if late is not None and late > 0.05 and "concurrency" not in run["arrivals"]:
        notes.append(f"{name}: requests were sent up to {shown_s(late)} (p99) later than due")
    return notes


def aligned(rows: Sequence[Row]) -> str:
    """The first two columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)


def shown_s(seconds: float | None) -> str:
    """With three digits or so."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def shown_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _row(run: RunData, objectives: bool) -> Row:
    """KV is that of the whole run, warm-up included."""
    summary, transfers = run["summary"], run["transfers"]
    return (
        run["label"],
        run["load"],
        f"{summary['completed']}/{summary['requests']}",
        *_pair(run, "ttft"),
        *_pair(run, "tpot"),
        *_pair(run, "jct"),
        f"{summary['output_tokens_per_s']:.1f}",
        f"{summary['good_share'] * 100:.0f} %" if objectives else "-",
        "-" if not transfers or not transfers["hand_offs"] else shown_bytes(transfers["bytes_sent"]),
    )


def _pair(run: RunData, name: str) -> Iterable[str]:
    return (shown_s(latency(run, name, figure)) for figure in ("mean", "p99"))
