"""Charts of lines, and small multiples of them. They know numbers, not runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedfa.report.html.chart import (
    NARROW,
    SMALL,
    TEXT,
    KeyEntry,
    Scale,
    key_rows,
    number,
    on_sheet,
    short,
    tick_texts,
    ticks,
)
from fedfa.report.html.drawing import Area, Dots, Drawing, Line, Point, Words, shorten, text_width
from fedfa.report.html.palette import Style


@dataclass(frozen=True)
class Series:
    """A line with its look; ``band`` has the lowest and highest value at each point."""

    name: str
    style: Style
    points: Sequence[Point]
    band: Sequence[Point] | None = None
    after: Point | None = None
    """What came of a step after the last round; a diamond beside the line."""


@dataclass(frozen=True)
class Axis:
    """An axis: its words, and its ends where the data shall not decide."""

    label: str
    low: float | None = None
    high: float | None = None
    whole: bool = False
    """Marks at whole numbers only."""


@dataclass(frozen=True)
class Panel:
    """One of several charts with the same axes: its own lines, in front of grey ones."""

    title: str
    series: Sequence[Series]
    behind: Sequence[Series] = ()


def _range(axis: Axis, values: Sequence[float], about: int) -> tuple[float, float]:
    """The ends of an axis: as asked, or round numbers around the data."""
    low = min(values, default=0.0) if axis.low is None else axis.low
    high = max(values, default=1.0) if axis.high is None else axis.high
    if high <= low:
        high = low + (abs(low) * 0.1 or 1.0)
    step = next((b - a for a, b in zip(ticks(low, high, about), ticks(low, high, about)[1:], strict=False)), high - low)
    if axis.low is None:
        low = math.floor(low / step + 1e-9) * step
    if axis.high is None:
        high = math.ceil(high / step - 1e-9) * step
    return low, high


# -- lines ------------------------------------------------------------------------------------------------------------
def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, width: float, height: float, *, names: bool = True
) -> Drawing:
    """Lines over a common axis, with their bands.

    Args:
        series: The lines.
        x: The axis below.
        y: The axis at the left; its words stand above it.
        width: Of the drawing.
        height: Of the drawing; grows where the names need more.
        names: Write names and last values beside the lines' ends if there is room; otherwise a key stands below.
    """
    shown = [one for one in series if one.points]
    end = max((_last(one)[0] for one in shown), default=0.0)
    labels = [f"{one.name} {number(_last(one)[1])}{_ended(one, end, x)}" for one in shown]
    room = max((text_width(label) for label in labels), default=0) + 44
    names = names and room <= 0.42 * width
    height = max(height, 74 + 15.0 * len(labels)) if names else height
    drawing = Drawing(width, height)
    if not names:
        entries = [
            KeyEntry(label, one.style.colour, one.style.dash, series=place)
            for place, (one, label) in enumerate(zip(shown, labels, strict=True))
        ]
        drawing.height = key_rows(drawing, entries, height + 4, width)
        room = 12
    bottom, top = height - 38, 26.0
    y_range = _range(y, _heights(shown), 5)
    left = _room_for_marks(y_range, 5)
    box = (left, top, width - room - left, bottom - top)
    _, down = _frame(drawing, box, x, y, shown, y_range, panel=0)
    drawing.add(Words((4, 14), y.label, "muted", TEXT))
    if names:
        _names(drawing, shown, labels, box, down)
    return drawing


def multiples(panels: Sequence[Panel], x: Axis, y: Axis, width: float, *, panel_width: float = 240) -> Drawing:
    """Small charts of equal axes in rows, each with a title; a key below where a chart has several lines."""
    columns = max(1, min(len(panels), round(width / panel_width)))
    rows = math.ceil(len(panels) / columns)
    everything = [one for panel in panels for one in (*panel.series, *panel.behind)]
    y_range = _range(y, _heights(everything), 4)
    left = _room_for_marks(y_range, 4)
    gap, inner = 22.0, 118.0 if width > NARROW else 96.0
    each = min((width - left - gap * columns) / columns, 1.6 * panel_width)
    pitch = inner + 46
    drawing = Drawing(width, rows * pitch + 34)
    drawing.add(Words((4, 14), y.label, "muted", TEXT))
    for place, panel in enumerate(panels):
        column, row = place % columns, place // columns
        box = (left + column * (each + gap), 44 + row * pitch, each, inner)
        last_row = place + columns >= len(panels)
        frame_x = x if last_row else Axis("", x.low, x.high, x.whole)
        _frame(
            drawing, box, frame_x, y, panel.series, y_range, panel=place, behind=panel.behind, everything=everything,
            y_marks=column == 0, about=(3, 4),
        )  # fmt: skip
        drawing.add(Words((box[0], box[1] - 7), shorten(panel.title, each, TEXT), "ink", TEXT, bold=True))
    looks = {one.name: one.style for panel in panels for one in panel.series if len(panel.series) > 1}
    if looks:
        entries = [KeyEntry(name, look.colour, look.dash) for name, look in looks.items()]
        drawing.height = key_rows(drawing, entries, drawing.height + 4, width)
    return drawing


def _last(series: Series) -> Point:
    return series.after or series.points[-1]


def _ended(series: Series, end: float, x: Axis) -> str:
    """Where a line ends, if others of its kind go on."""
    last = series.points[-1][0]
    return f" at {last:g}" if x.whole and last < end - 1 and series.after is None else ""


def _heights(series: Sequence[Series]) -> list[float]:
    values = [y for one in series for _, y in one.points]
    values += [edge for one in series for pair in one.band or () for edge in pair]
    return values + [one.after[1] for one in series if one.after]


def _room_for_marks(ends: tuple[float, float], about: int) -> float:
    return 12 + max(text_width(text, SMALL) for text in tick_texts(ticks(*ends, about)))


def _frame(
    drawing: Drawing,
    box: tuple[float, float, float, float],
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    y_range: tuple[float, float],
    *,
    panel: int,
    behind: Sequence[Series] = (),
    everything: Sequence[Series] | None = None,
    y_marks: bool = True,
    about: tuple[int, int] = (7, 5),
) -> tuple[Scale, Scale]:
    """Axes and lines in a box; returns how values become pixels."""
    left, top, width, height = box
    bottom = top + height
    of = [one for one in (everything or [*series, *behind]) if one.points]
    across_values = [p[0] for one in of for p in one.points] + [one.after[0] for one in of if one.after]
    low = min(across_values, default=0.0) if x.low is None else x.low
    high = max(across_values, default=1.0) if x.high is None else x.high
    if high <= low:
        high = low + 1
    across, down = Scale(low, high, left, left + width), Scale(*y_range, bottom, top)
    marks = ticks(*y_range, about[1])
    for mark, text in zip(marks, tick_texts(marks), strict=True):
        drawing.add(Line([[(left, down(mark)), (left + width, down(mark))]], "grid"))
        if y_marks:
            drawing.add(Words((left - 6, down(mark) + 4), text, "muted", SMALL, "end"))
    drawing.add(Line([[(left, bottom), (left + width, bottom)]], "faint"))
    marks = ticks(low, high, max(2, min(about[0], int(width / 58))), whole=x.whole)
    for mark, text in zip(marks, tick_texts(marks), strict=True):
        drawing.add(Line([[(across(mark), bottom), (across(mark), bottom + 4)]], "faint"))
        at = (on_sheet(drawing, across(mark), text), bottom + 17)
        drawing.add(Words(at, text, "muted", SMALL, "middle"))
    if x.label:
        drawing.add(Words((left + width, bottom + 33), x.label, "muted", TEXT, "end"))
    for one in behind:
        if one.points:
            drawing.add(Line([[(across(a), down(b)) for a, b in one.points]], "faint", 1.0, opacity=0.8))
    for place, one in enumerate(series):
        _draw_series(drawing, one, place, across, down, small=bool(behind) or width < 260)
    drawing.plots.append(
        {"k": "line", "p": panel, "r": [round(v, 1) for v in box], "x": [low, high], "y": list(y_range)}
    )
    return across, down


def _draw_series(drawing: Drawing, one: Series, place: int, across: Scale, down: Scale, *, small: bool) -> None:
    if not one.points:
        return
    colour = one.style.colour
    if one.band and len(one.points) > 1:
        lower = [(across(p[0]), down(b[0])) for p, b in zip(one.points, one.band, strict=True)]
        upper = [(across(p[0]), down(b[1])) for p, b in zip(one.points, one.band, strict=True)]
        drawing.add(Area([*lower, *reversed(upper)], colour, 0.18, series=place))
    points = [(across(a), down(b)) for a, b in one.points]
    drawing.add(Line([points], colour, 1.8 if small else 2.0, one.style.dash, series=place))
    if len(points) == 1:
        drawing.add(Dots(points, colour, 3.5, series=place))
    if one.after:
        end = (across(one.after[0]), down(one.after[1]))
        drawing.add(Line([[points[-1], end]], colour, 1.2, (2, 2), series=place))
        drawing.add(Dots([end], colour, 4.0, "diamond", rim="surface", series=place))


def _names(
    drawing: Drawing,
    series: Sequence[Series],
    labels: Sequence[str],
    box: tuple[float, float, float, float],
    down: Scale,
) -> None:
    """Names at the lines' ends, moved apart, each with a stroke in the line's look that leads to it."""
    left, top, width, height = box
    order = sorted(range(len(series)), key=lambda place: down(_last(series[place])[1]))
    places = spread([down(_last(series[place])[1]) for place in order], 15.0, top + 2, top + height)
    edge = left + width
    for place, y in zip(order, places, strict=True):
        one = series[place]
        from_y = down(_last(one)[1])
        drawing.add(
            Line([[(edge + 3, from_y), (edge + 14, y)]], one.style.colour, 0.8, opacity=0.7, series=place),
            Line([[(edge + 15, y), (edge + 35, y)]], one.style.colour, 2.2, one.style.dash, series=place),
            Words((edge + 40, y + 4), labels[place], "ink", TEXT, series=place),
        )


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones (which ascend), at least a gap apart, between two ends if that is possible.

    Example:
        >>> spread([10, 11, 50], 10, 0, 100)
        [5.5, 15.5, 50.0]
    """
    blocks: list[tuple[float, int]] = []  # centre of the block, how many are in it
    for at in wanted:
        blocks.append((float(at), 1))
        while True:
            centre, count = blocks[-1]
            half = gap * (count - 1) / 2
            centre = min(max(centre, low + half), max(high - half, low + half))
            blocks[-1] = (centre, count)
            if len(blocks) < 2:
                break
            before, others = blocks[-2]
            if before + gap * (others - 1) / 2 + gap <= centre - half + 1e-9:
                break
            blocks[-2:] = [((before * others + centre * count) / (others + count), others + count)]
    return [centre + gap * (k - (count - 1) / 2) for centre, count in blocks for k in range(count)]


def hover_lines(series: Sequence[Series], x: str, unit: str) -> dict[str, Any]:
    """What a pointer reads from lines."""
    return {
        "k": "line", "x": x, "u": unit,
        "s": [
            {
                "n": one.name, "c": one.style.colour,
                "p": [
                    [short(a), short(b), *([short(v) for v in one.band[i]] if one.band else [])]
                    for i, (a, b) in enumerate(one.points)
                ],
                **({"after": [short(v) for v in one.after]} if one.after else {}),
            }
            for one in series
        ],
    }  # fmt: skip
