"""Scatter plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedfa.report.html.chart import TEXT, LegendEntry, Scale, draw_legend
from fedfa.report.html.drawing import Dots, Drawing, Line, Point, Text, shorten


@dataclass(frozen=True)
class ScatterPanel:
    """Points in one group per category; ``stars``, one per category, are larger and outlined."""

    title: str
    groups: Sequence[Sequence[Point]]
    stars: Sequence[Point] = ()


SHAPES = ("circle", "triangle", "square", "diamond")


def category_style(category: int) -> tuple[str, str]:
    """Colour and shape of a category; the first 32 all differ."""
    return f"s{category % 8}", SHAPES[category // 8 % len(SHAPES)]


def scatter_plots(
    panels: Sequence[ScatterPanel], categories: Sequence[str], width: float, *, panel_width: float = 330
) -> Drawing:
    """Scatter plots without axes side by side, with one legend below."""
    columns = max(1, min(len(panels), round(width / panel_width)))
    gap = 14.0
    side = min((width - 8 - gap * (columns - 1)) / columns, 420.0)
    drawing = Drawing(width, 0)
    for place, panel in enumerate(panels):
        left, top = 4 + place % columns * (side + gap), 6 + place // columns * (side + 30)
        drawing.add(Text((left, top + 12), shorten(panel.title, side, TEXT), "ink", TEXT, bold=True))
        _draw_panel(drawing, panel, left, top + 20, side)
        drawing.height = max(drawing.height, top + side + 26)
    styles = map(category_style, range(len(categories)))
    entries = [LegendEntry(name, colour, shape=shape) for name, (colour, shape) in zip(categories, styles, strict=True)]
    drawing.height = draw_legend(drawing, entries, drawing.height + 4, width)
    return drawing


def _draw_panel(drawing: Drawing, panel: ScatterPanel, left: float, top: float, side: float) -> None:
    points = [point for group in panel.groups for point in group] + list(panel.stars)
    if not points:
        return
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    right, bottom = left + side, top + side
    across, down = Scale(min(xs), max(xs), left + 8, right - 8), Scale(min(ys), max(ys), bottom - 8, top + 8)
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    drawing.add(Line([corners], "grid"))
    for category, group in enumerate(panel.groups):
        colour, shape = category_style(category)
        drawing.add(Dots([(across(x), down(y)) for x, y in group], colour, 1.9, shape, opacity=0.75))
    for category, (x, y) in enumerate(panel.stars):
        colour, shape = category_style(category)
        drawing.add(Dots([(across(x), down(y))], colour, 5, shape, rim="ink"))
