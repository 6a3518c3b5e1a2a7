"""Heat maps: tables as colours."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedfa.report.html.chart import (
    SMALL,
    TEXT,
    number,
    on_sheet,
    short,
    ticks,
)
from fedfa.report.html.drawing import Boxes, Drawing, Words, shorten, text_width
from fedfa.report.html.palette import STEPS, step_role


@dataclass(frozen=True)
class Heat:
    """A table as colours; None stays empty."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    title: str = ""
    row_word: str = ""
    column_word: str = ""
    unit: str = ""

    def hover(self) -> dict[str, Any]:
        """What a pointer reads."""
        values = [[None if v is None else short(v) for v in row] for row in self.values]
        words = {"rw": self.row_word, "cw": self.column_word, "u": self.unit}
        return {"k": "heat", "rows": list(self.rows), "cols": list(self.columns), "v": values, **words}


def heat_map(
    heat: Heat,
    width: float,
    *,
    low: float,
    high: float,
    scale: str = "q",
    cell: float = 24.0,
    share: Callable[[float], float] | None = None,
    digits: int | None = 0,
    key: str = "",
) -> Drawing:
    """A table as colours, with numbers in the cells where they fit.

    Args:
        heat: The table.
        width: Of the drawing.
        low: The value of the first colour.
        high: The value of the last colour.
        scale: ``"q"`` from little to much, ``"d"`` two ways.
        cell: Height of a row.
        share: From a value to its place on the scale between 0 and 1; left out, straight.
        digits: Of the numbers in cells; None for no numbers.
        key: Words of the colour key.
    """
    drawing = Drawing(width, 0)
    top = _key(drawing, width, low, high, scale, key, heat.title)
    bottom = _heat(drawing, heat, (4, top, width - 8), low, high, scale, cell, share, digits, panel=0)
    drawing.height = bottom + 4
    return drawing


def heat_maps(
    heats: Sequence[Heat],
    width: float,
    *,
    low: float,
    high: float,
    scale: str = "q",
    cell: float = 9.0,
    panel_width: float = 330,
    key: str = "",
    square: bool = False,
) -> Drawing:
    """Small heat maps of equal scale in rows, each with its title."""
    columns = max(1, min(len(heats), round(width / panel_width)))
    gap = 18.0
    each = (width - 8 - gap * (columns - 1)) / columns
    if square:
        each = min(each, 300)
    drawing = Drawing(width, 0)
    top = _key(drawing, width, low, high, scale, key, "")
    deepest = top
    for place, heat in enumerate(heats):
        if place % columns == 0:
            top = deepest + (10 if place else 0)
        left = 4 + place % columns * (each + gap)
        drawing.add(Words((left, top + 12), shorten(heat.title, each, TEXT), "ink", TEXT, bold=True))
        size = (each - _label_room(heat, each)) / max(len(heat.columns), 1) if square else cell
        end = _heat(drawing, heat, (left, top + 18, each), low, high, scale, size, None, None, panel=place)
        deepest = max(deepest, end)
    drawing.height = deepest + 4
    return drawing


def _key(drawing: Drawing, width: float, low: float, high: float, scale: str, words: str, title: str) -> float:
    """The colour key at the top right; returns where the picture may begin."""
    if not words:
        return 6.0
    size, text_low, text_high = 13.0, tick_or_number(low), tick_or_number(high)
    right = width - 6 - text_width(text_high, SMALL)
    left = right - STEPS * size
    for step in range(STEPS):
        drawing.add(Boxes([(left + step * size, 4, size, 11)], f"{scale}{step}"))
    drawing.add(
        Words((right + 4, 14), text_high, "muted", SMALL),
        Words((left - 5, 14), text_low, "muted", SMALL, "end"),
        Words((4, 14), shorten(words, left - 16 - text_width(text_low, SMALL), TEXT), "muted", TEXT),
    )
    return 26.0


def tick_or_number(value: float) -> str:
    """A whole number without its point."""
    return f"{value:,.0f}" if value == int(value) else number(value)


def _label_room(heat: Heat, width: float) -> float:
    return min(max((text_width(row, SMALL) for row in heat.rows), default=0) + 8, width * 0.36)


def _heat(
    drawing: Drawing,
    heat: Heat,
    at: tuple[float, float, float],
    low: float,
    high: float,
    scale: str,
    cell: float,
    share: Callable[[float], float] | None,
    digits: int | None,
    *,
    panel: int,
) -> float:
    """Cells, labels and axis words; returns the bottom."""
    x, top, width = at
    room = _label_room(heat, width)
    left, count = x + room, max(len(heat.columns), 1)
    wide = (width - room) / count
    place = share or (lambda value: (value - low) / ((high - low) or 1))
    gap = 1.0 if wide > 8 and cell > 8 else 0.0
    by_colour: dict[str, list[tuple[float, float, float, float]]] = {}
    words: list[Words] = []
    for r, row in enumerate(heat.values):
        for c, value in enumerate(row):
            if value is None or not math.isfinite(value):
                continue
            role = step_role(scale, place(value))
            by_colour.setdefault(role, []).append((left + c * wide, top + r * cell, wide - gap, cell - gap))
            if digits is not None:
                text = f"{value:.{digits}f}"
                if text_width(text, SMALL) + 4 < wide and cell >= 16:
                    words.append(
                        Words((left + (c + 0.5) * wide, top + (r + 0.5) * cell + 4), text, _on(role), SMALL, "middle")
                    )
    for role in sorted(by_colour):
        drawing.add(Boxes(by_colour[role], role))
    drawing.add(*words)
    every = max(1, math.ceil(13 / cell))
    for r, name in enumerate(heat.rows):
        if r % every == 0:
            text = shorten(name, room - 6, SMALL)
            drawing.add(Words((left - 6, top + (r + 0.5) * cell + 4), text, "muted", SMALL, "end"))
    bottom = top + len(heat.rows) * cell
    drawing.plots.append({"k": "heat", "p": panel, "r": [round(v, 1) for v in (left, top, width - room, bottom - top)]})
    return _column_labels(drawing, heat, left, bottom, wide)


def _column_labels(drawing: Drawing, heat: Heat, left: float, bottom: float, wide: float) -> float:
    longest = max((text_width(name, SMALL) for name in heat.columns), default=0)
    numbers = _ascending(heat.columns)
    if longest + 6 <= wide or numbers:
        marks: list[tuple[float, str]] = [(c, name) for c, name in enumerate(heat.columns)]
        if longest + 6 > wide:
            marks = _round_marks(numbers, int(wide * len(numbers) / (longest + 10)))
        for place, name in marks:
            at = (on_sheet(drawing, left + (place + 0.5) * wide, name), bottom + 14)
            drawing.add(Words(at, name, "muted", SMALL, "middle"))
        bottom += 18
    else:  # names that do not fit side by side stand upright
        room = min(longest, 96.0)
        every = max(1, math.ceil(13 / wide))
        for c, name in enumerate(heat.columns):
            if c % every == 0:
                text = shorten(name, room, SMALL)
                at = (left + (c + 0.5) * wide + 4, bottom + 6)
                drawing.add(Words(at, text, "muted", SMALL, "end", turned=True))
        bottom += room + 10
    if heat.column_word and numbers:
        drawing.add(Words((left + wide * len(heat.columns), bottom + 12), heat.column_word, "muted", TEXT, "end"))
        bottom += 16
    return bottom


def _ascending(names: Sequence[str]) -> list[int]:
    """Names as numbers if they are ascending ones, such as rounds; otherwise none."""
    if not all(name.isdigit() for name in names):
        return []
    numbers = [int(name) for name in names]
    return numbers if all(a < b for a, b in pairwise(numbers)) else []


def _round_marks(numbers: Sequence[int], about: int) -> list[tuple[float, str]]:
    """Round numbers within ascending ones, each with its place among them; it may lie between two.

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
    """The colour of letters on a step of a scale."""
    step = int(role[1:])
    dark = step >= 5 if role[0] == "q" else step <= 1 or step >= 7
    return "surface" if dark else "ink"
