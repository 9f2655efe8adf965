"""A report as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from microserving.bench.charts import histogram, panel, timeline
from microserving.bench.report import Report, RunData, labels_of, latency
from microserving.bench.table import FIGURES, latency_rows, notes_on, shown_bytes, shown_s

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2em auto; max-width: 1080px; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #e3e3e3; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
svg { max-width: 100%; height: auto; } pre { background: #f6f6f6; padding: 1em; overflow: auto; font-size: 12px; }
summary { cursor: pointer; padding: 4px 0; } .note { color: #a33; }"""


def page(report: Report, title: str = "microserving bench") -> str:
    """The whole file."""
    runs: list[RunData] = report["runs"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        _introduction(report),
        panel(report),
        *(f'<p class="note">{escape(note)}</p>' for run in runs for note in notes_on(run)),
        "<h2>All runs</h2>",
        _overview(runs, report.get("slo") is not None),
        "<p>KV sent: in all, with warm-up. Transfer: the mean time that writing the KV of a hand-off took; exposed: how much "
        "the hand-off (with its hand-shakes) delayed the answer; hidden: how much of the writing went on while the prompt "
        "was computed.</p>",
        "<h2>Gaps between tokens</h2>",
        *_histograms(runs),
        "<h2>Each run</h2>",
        *(_run(run) for run in runs),
        "<h2>Measured with</h2>",
        f"<pre>{escape(json.dumps({k: v for k, v in report.items() if k != 'runs'}, indent=1))}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _introduction(report: Report) -> str:
    workload = ", ".join(f"{key} {value}" for key, value in report["workload"].items() if key != "name")
    machine = report["machine"]
    cores = len(machine["cores"])
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report["made_at"]))
    ended = " Ended early." if report["stopped"] else ""
    if report.get("error"):
        ended = f" Ended early: {escape(report['error'])}."
    return (
        f"<p>Workload {escape(report['workload']['name'])} ({escape(workload)}), {report['sessions']} counted after "
        f"{report['warmup']} for warm-up, seed {report['seed']}. {escape(machine['processor'])}, {cores} cores. {made}.{ended}"
        "<br>TTFT and JCT count from the time at which a request was due, whether the client could send it then or not."
        "</p>"
    )


def _overview(runs: Sequence[RunData], objectives: bool) -> str:
    head = [
        "pattern",
        "load",
        "completed",
        "failed",
        "TTFT mean",
        "P99",
        "TPOT mean",
        "P99",
        "ITL P99",
        "JCT mean",
        "P99",
    ]
    head += ["requests/s", "tokens/s", "goodput/s", "KV sent", "transfer", "exposed", "hidden"]
    rows = []
    for run in sorted(runs, key=lambda run: (run["rate"] or 0.0, run["began_at"])):
        summary = run["summary"]
        pairs = [
            shown_s(latency(run, name, figure))
            for name, figures in (
                ("ttft", "mean p99"),
                ("tpot", "mean p99"),
                ("itl", "p99"),
                ("jct", "mean p99"),
            )
            for figure in figures.split()
        ]
        rates = [f"{summary[key]:.2f}" for key in ("requests_per_s", "output_tokens_per_s")]
        rates.append(f"{summary['goodput_per_s']:.2f}" if objectives else "-")
        counts = [str(summary["completed"]), str(summary["failed"])]
        rows.append([run["label"], run["load"], *counts, *pairs, *rates, *_transfer_cells(run["transfers"])])
    return _table(head, rows)


def _transfer_cells(transfers: dict[str, Any] | None) -> list[str]:
    """Bytes in all, times of one hand-off."""
    if not transfers or not transfers["hand_offs"]:
        return ["-"] * 4
    each = [
        transfers[name] / transfers["hand_offs"] / 1000 for name in ("transfer_ms", "exposed_ms", "hidden_ms")
    ]
    return [shown_bytes(transfers["bytes_sent"]), *map(shown_s, each)]


def _histograms(runs: Sequence[RunData]) -> Iterable[str]:
    """Of each load."""
    labels = labels_of(runs)
    for load in dict.fromkeys(run["load"] for run in sorted(runs, key=lambda run: run["rate"] or 0.0)):
        drawn = histogram([run for run in runs if run["load"] == load], labels)
        yield _folded(load, drawn)


def _run(run: RunData) -> str:
    figures = _table(["latency", "", *FIGURES], [(title, "", *row) for title, *row in latency_rows(run)])
    counts = {key: value for key, value in run["summary"].items() if key not in ("latencies", "phases")}
    shown = json.dumps(
        {**counts, "transfers": run["transfers"], "client_cpu_s": run["client_cpu_s"]}, indent=1
    )
    return _folded(f"{run['label']}, {run['load']}", f"{figures}{timeline(run)}<pre>{escape(shown)}</pre>")


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    shown = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + f"</tr>{shown}</table>"
