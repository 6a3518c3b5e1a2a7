"""What all charts share: the finished figure, sizes, number formats, scales and legends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedfa.report.html.drawing import Dots, Drawing, Line, Text, shorten, text_width

SMALL, TEXT = 11.0, 12.0
"""Font sizes in pixels: tick labels, everything else."""
WIDE, HALF, NARROW = 920.0, 446.0, 344.0
"""Widths of drawings: the whole page, half of it, a phone."""


@dataclass(frozen=True)
class Table:
    """The numbers of a chart."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A chart with its texts, drawings and data."""

    name: str
    """Name of its files."""
    title: str
    caption: str
    alt: str
    """Description for screen readers."""
    wide: Drawing
    narrow: Drawing
    hover: Sequence[Any] = ()
    """Values that the pointer shows, for each panel."""
    table: Table | None = None
    half: bool = False


def number(value: float | None, digits: int | None = None) -> str:
    """Format a number with as many digits as are meaningful.

    Example:
        >>> number(1234567.0), number(83.3149), number(0.00123), number(None)
        ('1,234,567', '83.31', '0.00123', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if digits is not None:
        return f"{value:,.{digits}f}"
    size = abs(value)
    if size >= 1000 or value == 0:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Round numbers that divide a range; with ``whole``, integers only.

    Example:
        >>> ticks(0, 50, 5)
        [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
        >>> ticks(0, 10, 4), ticks(0, 10, 4, whole=True)
        ([0.0, 2.5, 5.0, 7.5, 10.0], [0.0, 5.0, 10.0])
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(about, 1)
    if whole:
        raw = max(raw, 1.0)
    power = 10.0 ** math.floor(math.log10(raw))
    steps = (power * factor for factor in (1, 2, 2.5, 5, 10))
    step = next(step for step in steps if step >= raw * 0.999 and not (whole and step % 1))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_texts(marks: Sequence[float]) -> list[str]:
    """Labels of ascending ticks, with the digits that their distance needs.

    Example:
        >>> tick_texts([0.0, 0.5, 1.0]), tick_texts([0.25, 0.5]), tick_texts([2000.0, 2500.0])
        (['0.0', '0.5', '1.0'], ['0.25', '0.50'], ['2,000', '2,500'])
    """
    step = marks[1] - marks[0] if len(marks) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**digits, 6) % 1 > 1e-6:
        digits += 1
    return [f"{mark:.0e}" if abs(mark) >= 1e7 else f"{mark:,.{digits}f}" for mark in marks]


def tick_label_centre(drawing: Drawing, x: float, text: str) -> float:
    """Centre of a tick label: at the tick, but inside the right edge."""
    return min(x, drawing.width - text_width(text, SMALL) / 2 - 1)


@dataclass(frozen=True)
class Scale:
    """Map values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        return self.start + (value - self.low) / ((self.high - self.low) or 1) * (self.end - self.start)


def short(value: float) -> float:
    """Round to five digits, more than a pointer can resolve."""
    return float(f"{value:.5g}")


@dataclass(frozen=True)
class LegendEntry:
    """A name with its line, or with its mark if it has a shape."""

    name: str
    colour: str
    dash: tuple[float, ...] = ()
    shape: str | None = None
    series: int | None = None


def draw_legend(drawing: Drawing, entries: Sequence[LegendEntry], top: float, width: float) -> float:
    """Draw a legend in as many rows as it needs; returns its bottom."""
    x, y = 4.0, top + 10
    for entry in entries:
        text = shorten(entry.name, width - 44, TEXT)
        wide = 26 + text_width(text, TEXT) + 12
        if x > 4 and x + wide > width:
            x, y = 4.0, y + 19
        if entry.shape is None:
            drawing.add(Line([[(x, y - 4), (x + 20, y - 4)]], entry.colour, 2.4, entry.dash, series=entry.series))
        else:
            drawing.add(Dots([(x + 10, y - 4)], entry.colour, 4.5, entry.shape, series=entry.series))
        drawing.add(Text((x + 25, y), text, "ink", TEXT, series=entry.series))
        x += wide
    return y + 10
