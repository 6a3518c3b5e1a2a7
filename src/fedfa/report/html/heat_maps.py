"""Heat maps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedfa.report.html.chart import SMALL, TEXT, number, short, tick_label_centre, ticks
from fedfa.report.html.drawing import Boxes, Drawing, Text, shorten, text_width
from fedfa.report.html.palette import STEPS, step_role


@dataclass(frozen=True)
class Heat:
    """The table behind a heat map; None stays empty."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    title: str = ""
    row_word: str = ""
    column_word: str = ""
    unit: str = ""

    def hover(self) -> dict[str, Any]:
        """Values that the pointer shows."""
        values = [[None if v is None else short(v) for v in row] for row in self.values]
        labels = {"rw": self.row_word, "cw": self.column_word, "u": self.unit}
        return {"k": "heat", "rows": list(self.rows), "cols": list(self.columns), "v": values, **labels}


@dataclass(frozen=True)
class ColourScale:
    """Maps values to colours."""

    low: float
    high: float
    label: str = ""
    kind: str = "q"
    """``"q"`` sequential, ``"d"`` diverging."""
    root: bool = False
    """Use the square root, which separates small values from 0."""

    def role(self, value: float) -> str:
        """Colour of a value."""
        share = (value - self.low) / ((self.high - self.low) or 1)
        return step_role(self.kind, math.sqrt(share) if self.root else share)


def heat_maps(
    heats: Sequence[Heat],
    width: float,
    scale: ColourScale,
    *,
    cell: float = 9.0,
    panel_width: float = 330,
    square: bool = False,
    digits: int | None = None,
) -> Drawing:
    """Draw heat maps with one colour scale, titles above them.

    Rows have the height ``cell`` unless cells are square; numbers stand in the cells where they fit, None for none.
    """
    columns = max(1, min(len(heats), round(width / panel_width)))
    gap = 18.0
    each = (width - 8 - gap * (columns - 1)) / columns
    if square:
        each = min(each, 300)
    drawing = Drawing(width, 0)
    deepest = top = _draw_scale(drawing, width, scale)
    for place, heat in enumerate(heats):
        if place % columns == 0:
            top = deepest + (10 if place else 0)
        left = 4 + place % columns * (each + gap)
        if heat.title:
            drawing.add(Text((left, top + 12), shorten(heat.title, each, TEXT), "ink", TEXT, bold=True))
        size = (each - _label_width(heat, each)) / max(len(heat.columns), 1) if square else cell
        at = (left, top + 18 if heat.title else top, each)
        deepest = max(deepest, _draw_heat(drawing, heat, at, scale, size, digits, place))
    drawing.height = deepest + 4
    return drawing


def _draw_scale(drawing: Drawing, width: float, scale: ColourScale) -> float:
    """Draw the colour scale at the top right; returns the top of the heat map."""
    if not scale.label:
        return 6.0
    size, text_low, text_high = 13.0, _tick_or_number(scale.low), _tick_or_number(scale.high)
    right = width - 6 - text_width(text_high, SMALL)
    left = right - STEPS * size
    for step in range(STEPS):
        drawing.add(Boxes([(left + step * size, 4, size, 11)], f"{scale.kind}{step}"))
    drawing.add(
        Text((right + 4, 14), text_high, "muted", SMALL),
        Text((left - 5, 14), text_low, "muted", SMALL, "end"),
        Text((4, 14), shorten(scale.label, left - 16 - text_width(text_low, SMALL), TEXT), "muted", TEXT),
    )
    return 26.0


def _tick_or_number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else number(value)


def _label_width(heat: Heat, width: float) -> float:
    return min(max((text_width(row, SMALL) for row in heat.rows), default=0) + 8, width * 0.36)


def _draw_heat(
    drawing: Drawing,
    heat: Heat,
    at: tuple[float, float, float],
    scale: ColourScale,
    cell: float,
    digits: int | None,
    panel: int,
) -> float:
    """Draw cells and labels; returns the bottom."""
    x, top, width = at
    labels = _label_width(heat, width)
    left = x + labels
    wide = (width - labels) / max(len(heat.columns), 1)
    gap = 1.0 if wide > 8 and cell > 8 else 0.0
    by_colour: dict[str, list[tuple[float, float, float, float]]] = {}
    numbers: list[Text] = []
    for r, row in enumerate(heat.values):
        for c, value in enumerate(row):
            if value is None or not math.isfinite(value):
                continue
            role = scale.role(value)
            by_colour.setdefault(role, []).append((left + c * wide, top + r * cell, wide - gap, cell - gap))
            if digits is not None:
                text = f"{value:.{digits}f}"
                if text_width(text, SMALL) + 4 < wide and cell >= 16:
                    numbers.append(
                        Text((left + (c + 0.5) * wide, top + (r + 0.5) * cell + 4), text, _on(role), SMALL, "middle")
                    )
    for role in sorted(by_colour):
        drawing.add(Boxes(by_colour[role], role))
    drawing.add(*numbers)
    every = max(1, math.ceil(13 / cell))
    for r, name in enumerate(heat.rows):
        if r % every == 0:
            text = shorten(name, labels - 6, SMALL)
            drawing.add(Text((left - 6, top + (r + 0.5) * cell + 4), text, "muted", SMALL, "end"))
    bottom = top + len(heat.rows) * cell
    drawing.plots.append(
        {"k": "heat", "p": panel, "r": [round(v, 1) for v in (left, top, width - labels, bottom - top)]}
    )
    return _column_labels(drawing, heat, left, bottom, wide)


def _column_labels(drawing: Drawing, heat: Heat, left: float, bottom: float, wide: float) -> float:
    longest = max((text_width(name, SMALL) for name in heat.columns), default=0)
    numbers = _ascending(heat.columns)
    if longest + 6 <= wide or numbers:
        marks: list[tuple[float, str]] = [(c, name) for c, name in enumerate(heat.columns)]
        if longest + 6 > wide:
            marks = _round_marks(numbers, int(wide * len(numbers) / (longest + 10)))
        for place, name in marks:
            at = (tick_label_centre(drawing, left + (place + 0.5) * wide, name), bottom + 14)
            drawing.add(Text(at, name, "muted", SMALL, "middle"))
        bottom += 18
    else:  # names that do not fit side by side are rotated
        length = min(longest, 96.0)
        every = max(1, math.ceil(13 / wide))
        for c, name in enumerate(heat.columns):
            if c % every == 0:
                text = shorten(name, length, SMALL)
                at = (left + (c + 0.5) * wide + 4, bottom + 6)
                drawing.add(Text(at, text, "muted", SMALL, "end", turned=True))
        bottom += length + 10
    if heat.column_word and numbers:
        drawing.add(Text((left + wide * len(heat.columns), bottom + 12), heat.column_word, "muted", TEXT, "end"))
        bottom += 16
    return bottom


def _ascending(names: Sequence[str]) -> list[int]:
    """Names as integers if they ascend, such as rounds; otherwise empty."""
    if not all(name.isdigit() for name in names):
        return []
    numbers = [int(name) for name in names]
    return numbers if all(a < b for a, b in pairwise(numbers)) else []


def _round_marks(numbers: Sequence[int], about: int) -> list[tuple[float, str]]:
    """Round numbers within ascending ones, each with its (fractional) index among them.

    Example:
        >>> _round_marks([2, 4, 6, 8, 10], 2)
        [(1.5, '5'), (4.0, '10')]
    """
    marks = []
    for mark in ticks(numbers[0], numbers[-1], about, whole=True):
        after = bisect_left(numbers, mark)
        low, high = numbers[max(after - 1, 0)], numbers[after]
        marks.append((after - (high - mark) / ((high - low) or 1), f"{mark:.0f}"))
    return marks


def _on(role: str) -> str:
    """Colour of text on a step of a colour scale."""
    step = int(role[1:])
    dark = step >= 5 if role[0] == "q" else step <= 1 or step >= 7
    return "surface" if dark else "ink"
