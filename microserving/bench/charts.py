"""What a report shows as pictures: the panel of latencies against the request rate, a histogram of gaps, a time line."""

from __future__ import annotations

from collections.abc import Sequence

from microserving.bench import svg
from microserving.bench.measurement import INTERRUPTED, Measured
from microserving.bench.report import Report, RunData, labels_of, latency, records_of
from microserving.bench.statistics import percentile

_PLOT_WIDTH, _PLOT_HEIGHT = 270.0, 170.0
_GAP_X, _GAP_Y = 72.0, 72.0
_LEFT, _TOP = 64.0, 40.0
_MS = 1000.0
_BINS = 60
_TITLE_CHARS = 36
_MAX_BARS = 1000
"""Requests in a time line: a picture of more is too large for a browser."""
_WAIT, _PREFILL, _DECODE, _FAILED = "#bbbbbb", "#E69F00", "#0072B2", "#D55E00"
_PANEL = (("ttft", "TTFT", "s", 1.0), ("tpot", "TPOT", "ms", _MS), ("jct", "JCT", "s", 1.0))


def panel(report: Report) -> str:
    """3 x 2: mean and 99th percentile of TTFT, TPOT and JCT against the rate, a line for each pattern. Empty when there are
    no rates."""
    runs = [run for run in report["runs"] if run["rate"] is not None]
    if not runs:
        return ""
    labels = labels_of(report["runs"])
    width = _LEFT + 3 * _PLOT_WIDTH + 2 * _GAP_X + 20
    key, key_height = svg.legend(labels, _LEFT, 18, width - _LEFT - 20)
    top = _TOP + key_height
    parts = list(key)
    for row, (figure, words) in enumerate((("mean", "mean"), ("p99", "P99"))):
        for column, (name, title, unit, scale) in enumerate(_PANEL):
            box = svg.Box(
                _LEFT + column * (_PLOT_WIDTH + _GAP_X),
                top + row * (_PLOT_HEIGHT + _GAP_Y),
                _PLOT_WIDTH,
                _PLOT_HEIGHT,
            )
            lines = _curves(runs, labels, name, figure, scale)
            parts += _plotted(box, f"{title}, {words}", f"{title} ({unit})", lines)
    height = top + 2 * _PLOT_HEIGHT + _GAP_Y + 46
    return svg.document(width, height, parts, "Mean and P99 of TTFT, TPOT and JCT against the request rate")


def histogram(runs: Sequence[RunData], labels: Sequence[str]) -> str:
    """Of the gaps between tokens, for runs at the same load: a small plot for each, with the same axes."""
    gaps = {run["label"]: [gap * _MS for record in _counted(run) for gap in record.gaps] for run in runs}
    gaps = {label: values for label, values in gaps.items() if values}
    if not gaps:
        return ""
    end = svg.round_up(max(percentile(values, 0.995) for values in gaps.values()))
    shares = {label: _binned(values, end) for label, values in gaps.items()}
    tallest = svg.round_up(100 * max(max(bins) for bins in shares.values()))
    width, each = _LEFT + 2 * _PLOT_WIDTH + _GAP_X + 20, 110.0 + 66
    parts: list[str] = []
    for number, (label, bins) in enumerate(shares.items()):
        row, column = divmod(number, 2)
        box = svg.Box(_LEFT + column * (_PLOT_WIDTH + _GAP_X), 32 + row * each, _PLOT_WIDTH, 110)
        plot = svg.Plot(box, _shortened(label), "gap between tokens (ms)", "% of gaps", end, tallest)
        for index, share in enumerate(bins):
            if share:
                begin, stop = index * end / _BINS, (index + 1) * end / _BINS
                hint = f"{begin:.3g} to {stop:.3g} ms{' and more' if index == _BINS - 1 else ''}: {share:.1%}"
                plot.add_bar(begin, stop, 0, 100 * share, svg.colour_of(labels.index(label)), hint)
        parts += plot.parts
    rows = (len(shares) + 1) // 2
    return svg.document(width, 32 + rows * each, parts, "Histogram of the gaps between tokens")


def timeline(run: RunData) -> str:
    """A bar for each request of a run (its first ``_MAX_BARS``): waiting to be sent, until the first token, until the last
    one."""
    sent = [record for record in records_of(run) if record.sent is not None]
    if not sent:
        return ""
    records = sent[:_MAX_BARS]
    for record in records:
        if record.error == INTERRUPTED:
            record.ended = run["duration_s"]
    end = svg.round_up(max(_end_of(record) for record in records))
    each = 7.0 if len(records) <= 150 else 3.0
    box = svg.Box(_LEFT, 46, 900, each * len(records))
    part = f", the first {len(records)} requests of {len(sent)}" if len(records) < len(sent) else ""
    plot = svg.Plot(
        box, f"{run['label']}, {run['load']}{part}", "seconds", "request", end, float(len(records))
    )
    for row, record in enumerate(records):
        _add_request(plot, record, row)
    key = _key(
        (
            (_WAIT, "due, not sent"),
            (_PREFILL, "to the first token"),
            (_DECODE, "to the last one"),
            (_FAILED, "failed"),
        )
    )
    return svg.document(
        _LEFT + 930, box.y + box.height + 44, plot.parts + key, "What each request was doing when"
    )


def _curves(
    runs: Sequence[RunData], labels: Sequence[str], name: str, figure: str, scale: float
) -> list[svg.Line]:
    lines = []
    for place, label in enumerate(labels):
        found = [(run["rate"], latency(run, name, figure)) for run in runs if run["label"] == label]
        points = sorted((rate, value * scale) for rate, value in found if value is not None)
        if points:
            lines.append(svg.Line(place, points))
    return lines


def _plotted(box: svg.Box, title: str, y_title: str, lines: Sequence[svg.Line]) -> list[str]:
    points = [point for line in lines for point in line.points]
    x_max = max((x for x, _ in points), default=1.0) * 1.04
    y_max = svg.round_up(max((y for _, y in points), default=1.0))
    plot = svg.Plot(box, title, "requests/s", y_title, x_max, y_max)
    for line in lines:
        plot.add_line(line)
    return plot.parts


def _binned(values: Sequence[float], end: float) -> list[float]:
    """The share of the values in each bin; the last one has what is beyond ``end``, too."""
    bins = [0] * _BINS
    for value in values:
        bins[min(int(value / end * _BINS), _BINS - 1)] += 1
    return [count / len(values) for count in bins]


def _shortened(label: str) -> str:
    """As long as a plot is wide."""
    return label if len(label) <= _TITLE_CHARS else label[: _TITLE_CHARS - 1] + "…"


def _counted(run: RunData) -> list[Measured]:
    return [record for record in records_of(run) if record.counted and record.ok]


def _end_of(record: Measured) -> float:
    return max(record.ended or 0.0, record.sent or 0.0, *record.pieces[-1:], record.scheduled)


def _add_request(plot: svg.Plot, record: Measured, row: int) -> None:
    assert record.sent is not None
    end = _end_of(record)
    first = record.pieces[0] if record.pieces else end
    failed = record.error not in (None, INTERRUPTED)
    shade = "" if record.counted else " (not counted)"
    hint = f"request {record.session}{shade}: {record.prompt_tokens} + {record.output_tokens} tokens {record.error or ''}"
    low, high = row + 0.12, row + 0.88
    if not record.counted:  # thinner: warm-up, and what keeps the load up
        low, high = row + 0.35, row + 0.65
    plot.add_bar(record.scheduled, record.sent, low, high, _WAIT, hint)
    plot.add_bar(record.sent, first, low, high, _FAILED if failed else _PREFILL, hint)
    if record.pieces:
        plot.add_bar(first, end, low, high, _DECODE, hint)


def _key(colours: Sequence[tuple[str, str]]) -> list[str]:
    parts, left = [], _LEFT
    for colour, words in colours:
        parts.append(f'<rect x="{left:g}" y="8" width="14" height="10" fill="{colour}"/>')
        parts.append(svg.text(left + 20, 17, words, anchor="start", size=12))
        left += 40 + 6.6 * len(words)
    return parts
