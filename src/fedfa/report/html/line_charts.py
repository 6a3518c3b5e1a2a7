"""Line charts and small multiples of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedfa.report.html.chart import (
    NARROW,
    SMALL,
    TEXT,
    LegendEntry,
    Scale,
    draw_legend,
    number,
    short,
    tick_label_centre,
    tick_texts,
    ticks,
)
from fedfa.report.html.drawing import Area, Dots, Drawing, Line, Point, Text, shorten, text_width
from fedfa.report.html.palette import Style


@dataclass(frozen=True)
class Series:
    """A line with its style; ``band`` holds minimum and maximum at each point."""

    name: str
    style: Style
    points: Sequence[Point]
    band: Sequence[Point] | None = None
    after: Point | None = None
    """Result of the final pass, drawn as a diamond after the line."""


@dataclass(frozen=True)
class Axis:
    """An axis: its label, and its limits unless the data determine them."""

    label: str
    low: float | None = None
    high: float | None = None
    whole: bool = False
    """Ticks at integers only."""


@dataclass(frozen=True)
class Panel:
    """One of several charts with the same axes: its lines in front of grey ones."""

    title: str
    series: Sequence[Series]
    behind: Sequence[Series] = ()


def _range(axis: Axis, values: Sequence[float], about: int) -> tuple[float, float]:
    """Limits of an axis: as given, or round numbers around the data."""
    low = min(values, default=0.0) if axis.low is None else axis.low
    high = max(values, default=1.0) if axis.high is None else axis.high
    if high <= low:
        high = low + (abs(low) * 0.1 or 1.0)
    step = next((b - a for a, b in pairwise(ticks(low, high, about))), high - low)
    if axis.low is None:
        low = math.floor(low / step + 1e-9) * step
    if axis.high is None:
        high = math.ceil(high / step - 1e-9) * step
    return low, high


def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, width: float, height: float, *, names: bool = True
) -> Drawing:
    """Draw lines with their bands.

    Names and last values label the ends of the lines if that is asked for and they fit, for which the height may grow;
    otherwise a legend stands below.
    """
    shown = [one for one in series if one.points]
    end = max((_last(one)[0] for one in shown), default=0.0)
    labels = [f"{one.name} {number(_last(one)[1])}{_ended(one, end, x)}" for one in shown]
    names_width = max((text_width(label) for label in labels), default=0) + 44
    names = names and names_width <= 0.42 * width
    height = max(height, 74 + 15.0 * len(labels)) if names else height
    drawing = Drawing(width, height)
    if not names:
        entries = [
            LegendEntry(label, one.style.colour, one.style.dash, series=place)
            for place, (one, label) in enumerate(zip(shown, labels, strict=True))
        ]
        drawing.height = draw_legend(drawing, entries, height + 4, width)
        names_width = 12
    bottom, top = height - 38, 26.0
    y_range = _range(y, y_values(shown), 5)
    left = _tick_label_width(y_range, 5)
    box = (left, top, width - names_width - left, bottom - top)
    down = _draw_panel(drawing, box, x, Panel("", shown), y_range, shown, 0)
    drawing.add(Text((4, 14), y.label, "muted", TEXT))
    if names:
        _names(drawing, shown, labels, box, down)
    return drawing


def multiples(panels: Sequence[Panel], x: Axis, y: Axis, width: float, *, panel_width: float = 240) -> Drawing:
    """Small charts with equal axes, each with a title; a legend below if a chart has several lines."""
    columns = max(1, min(len(panels), round(width / panel_width)))
    rows = math.ceil(len(panels) / columns)
    everything = [one for panel in panels for one in (*panel.series, *panel.behind)]
    y_range = _range(y, y_values(everything), 4)
    left = _tick_label_width(y_range, 4)
    gap, inner = 22.0, 118.0 if width > NARROW else 96.0
    each = min((width - left - gap * columns) / columns, 1.6 * panel_width)
    pitch = inner + 46
    drawing = Drawing(width, rows * pitch + 34)
    drawing.add(Text((4, 14), y.label, "muted", TEXT))
    for place, panel in enumerate(panels):
        column, row = place % columns, place // columns
        box = (left + column * (each + gap), 44 + row * pitch, each, inner)
        last_row = place + columns >= len(panels)
        frame_x = x if last_row else Axis("", x.low, x.high, x.whole)
        _draw_panel(drawing, box, frame_x, panel, y_range, everything, place, y_labels=column == 0, about=(3, 4))
        drawing.add(Text((box[0], box[1] - 7), shorten(panel.title, each, TEXT), "ink", TEXT, bold=True))
    method_styles = {one.name: one.style for panel in panels for one in panel.series if len(panel.series) > 1}
    if method_styles:
        entries = [LegendEntry(name, line_style.colour, line_style.dash) for name, line_style in method_styles.items()]
        drawing.height = draw_legend(drawing, entries, drawing.height + 4, width)
    return drawing


def _last(series: Series) -> Point:
    return series.after or series.points[-1]


def _ended(series: Series, end: float, x: Axis) -> str:
    """Last round of a line that ends before the others."""
    last = series.points[-1][0]
    return f" at {last:g}" if x.whole and last < end - 1 and series.after is None else ""


def y_values(series: Sequence[Series]) -> list[float]:
    """All y values of lines and bands."""
    values = [y for one in series for _, y in one.points]
    values += [edge for one in series for pair in one.band or () for edge in pair]
    return values + [one.after[1] for one in series if one.after]


def _tick_label_width(ends: tuple[float, float], about: int) -> float:
    return 12 + max(text_width(text, SMALL) for text in tick_texts(ticks(*ends, about)))


def _draw_panel(
    drawing: Drawing,
    box: tuple[float, float, float, float],
    x: Axis,
    panel: Panel,
    y_range: tuple[float, float],
    everything: Sequence[Series],
    index: int,
    *,
    y_labels: bool = True,
    about: tuple[int, int] = (7, 5),
) -> Scale:
    """Draw axes and lines in a box; ``everything`` determines the x axis. Returns the vertical scale."""
    left, top, width, height = box
    bottom = top + height
    across_values = [p[0] for one in everything for p in one.points]
    across_values += [one.after[0] for one in everything if one.points and one.after]
    low = min(across_values, default=0.0) if x.low is None else x.low
    high = max(across_values, default=1.0) if x.high is None else x.high
    if high <= low:
        high = low + 1
    across, down = Scale(low, high, left, left + width), Scale(*y_range, bottom, top)
    marks = ticks(*y_range, about[1])
    for mark, text in zip(marks, tick_texts(marks), strict=True):
        drawing.add(Line([[(left, down(mark)), (left + width, down(mark))]], "grid"))
        if y_labels:
            drawing.add(Text((left - 6, down(mark) + 4), text, "muted", SMALL, "end"))
    drawing.add(Line([[(left, bottom), (left + width, bottom)]], "faint"))
    marks = ticks(low, high, max(2, min(about[0], int(width / 58))), whole=x.whole)
    for mark, text in zip(marks, tick_texts(marks), strict=True):
        drawing.add(Line([[(across(mark), bottom), (across(mark), bottom + 4)]], "faint"))
        at = (tick_label_centre(drawing, across(mark), text), bottom + 17)
        drawing.add(Text(at, text, "muted", SMALL, "middle"))
    if x.label:
        drawing.add(Text((left + width, bottom + 33), x.label, "muted", TEXT, "end"))
    for one in panel.behind:
        if one.points:
            drawing.add(Line([[(across(a), down(b)) for a, b in one.points]], "faint", 1.0, opacity=0.8))
    for place, one in enumerate(panel.series):
        _draw_series(drawing, one, place, across, down, small=bool(panel.behind) or width < 260)
    drawing.plots.append(
        {"k": "line", "p": index, "r": [round(v, 1) for v in box], "x": [low, high], "y": list(y_range)}
    )
    return down


def _draw_series(drawing: Drawing, one: Series, place: int, across: Scale, down: Scale, *, small: bool) -> None:
    if not one.points:
        return
    colour = one.style.colour
    if one.band and len(one.points) > 1:
        lower = [(across(p[0]), down(b[0])) for p, b in zip(one.points, one.band, strict=True)]
        upper = [(across(p[0]), down(b[1])) for p, b in zip(one.points, one.band, strict=True)]
        drawing.add(Area([*lower, *reversed(upper)], colour, opacity=0.18, series=place))
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
    """Label the ends of the lines; labels are moved apart and connected to their lines."""
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
            Text((edge + 40, y + 4), labels[place], "ink", TEXT, series=place),
        )


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones (ascending), at least a gap apart, between two limits if possible.

    Example:
        >>> spread([10, 11, 50], 10, 0, 100)
        [5.5, 15.5, 50.0]
    """
    blocks: list[tuple[float, int]] = []  # centre and size of each block
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
    """Values that the pointer shows for lines."""
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
