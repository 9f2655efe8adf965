"""Plots as SVG text, without any library: axes with round ticks, lines with markers, bars. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444", "#882255")
"""Told apart by most colour-blind readers (Okabe and Ito's, and one more)."""
_MARKS = 4
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_GRID = "#e3e3e3"
_INK = "#333333"
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """label as in the legend; its place among the labels decides colour, dashes and mark."""

    place: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Box:
    """Where a plot is drawn, without the room for its ticks and titles."""

    x: float
    y: float
    width: float
    height: float


@dataclass(slots=True)
class Plot:
    """One pair of axes; both begin at 0 or less and end at a round number."""

    box: Box
    title: str
    x_title: str
    y_title: str
    x_max: float
    y_max: float
    parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x_max = self.x_max if self.x_max > 0 else 1.0
        self.y_max = self.y_max if self.y_max > 0 else 1.0
        self._axes()

    def at(self, x: float, y: float) -> Point:
        """The place of a value on the page."""
        box = self.box
        return box.x + x / self.x_max * box.width, box.y + box.height - y / self.y_max * box.height

    def add_line(self, line: Line) -> None:
        points = [self.at(*point) for point in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour, dash = colour_of(line.place), _DASHES[line.place // len(COLOURS) % len(_DASHES)]
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
        )
        self.parts += [mark(line.place, x, y) for x, y in points]

    def add_bar(self, begin: float, end: float, low: float, high: float, colour: str, hint: str = "") -> None:
        """A rectangle between two values of x and two of y."""
        (x, bottom), (right, top) = self.at(begin, low), self.at(end, high)
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{max(right - x, 0.4):.1f}" height="{bottom - top:.1f}" '
            f'fill="{colour}">{title}</rect>'
        )

    def _axes(self) -> None:
        box = self.box
        bottom, right = box.y + box.height, box.x + box.width
        for value in ticks(self.y_max):
            y = self.at(0, value)[1]
            self.parts.append(line(box.x, y, right, y, _GRID))
            self.parts.append(text(box.x - 6, y + 3.5, number(value), anchor="end", size=10))
        for value in ticks(self.x_max):
            x = self.at(value, 0)[0]
            self.parts.append(line(x, bottom, x, bottom + 4, _INK))
            self.parts.append(text(x, bottom + 15, number(value), size=10))
        self.parts.append(line(box.x, bottom, right, bottom, _INK))
        self.parts.append(line(box.x, box.y, box.x, bottom, _INK))
        middle = box.x + box.width / 2
        self.parts.append(text(middle, box.y - 9, self.title, size=12, bold=True))
        self.parts.append(text(middle, bottom + 31, self.x_title, size=11))
        self.parts.append(text(box.x - 40, box.y + box.height / 2, self.y_title, size=11, turned=True))


def document(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """A whole SVG file. label: what it shows, for who cannot see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(label)}" font-family="sans-serif">'
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>' + "".join(parts) + "</svg>\n"
    )


def legend(labels: Sequence[str], x: float, y: float, width: float) -> tuple[list[str], float]:
    """One after the other, wrapped at ``width``, and how high it is."""
    parts, left, row = [], x, y
    for place, label in enumerate(labels):
        takes = 34 + 6.6 * len(label)
        if left + takes > x + width and left > x:
            left, row = x, row + 18
        parts.append(line(left, row, left + 20, row, colour_of(place), 1.8))
        parts.append(mark(place, left + 10, row))
        parts.append(text(left + 26, row + 4, label, anchor="start", size=12))
        left += takes + 12
    return parts, row - y + 18


def mark(place: int, x: float, y: float) -> str:
    colour = colour_of(place)
    match place % _MARKS:
        case 0:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}"/>'
        case 1:
            return f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4" fill="{colour}"/>'
        case 2:
            corners = f"{x:.1f},{y - 4.2:.1f} {x - 4:.1f},{y + 3:.1f} {x + 4:.1f},{y + 3:.1f}"
        case _:
            corners = (
                f"{x:.1f},{y - 4.4:.1f} {x + 4.4:.1f},{y:.1f} {x:.1f},{y + 4.4:.1f} {x - 4.4:.1f},{y:.1f}"
            )
    return f'<polygon points="{corners}" fill="{colour}"/>'


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "middle",
    size: int = 11,
    bold: bool = False,
    turned: bool = False,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{_INK}"{weight}{turn}>'
        f"{escape(words)}</text>"
    )


def line(x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1.0) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}" stroke-width="{width:g}"/>'


def colour_of(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def ticks(end: float) -> list[float]:
    """Round values from 0 to ``end``, about five."""
    step = _round_step(end)
    return [index * step for index in range(math.floor(end / step + 1e-9) + 1)]


def round_up(value: float) -> float:
    """The end of an axis for values up to ``value``: the next tick."""
    if value <= 0:
        return 1.0
    step = _round_step(value)
    return math.ceil(value / step - 1e-9) * step


def number(value: float) -> str:
    return f"{value:.4g}"


def _round_step(end: float) -> float:
    rough = end / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
