"""Clouds of points in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedfa.report.html.chart import (
    TEXT,
    KeyEntry,
    Scale,
    key_rows,
)
from fedfa.report.html.drawing import Dots, Drawing, Line, Point, Words, shorten


@dataclass(frozen=True)
class Cloud:
    """Points in the plane, a group for each kind; ``stars``, one for each kind, are larger and outlined."""

    title: str
    groups: Sequence[Sequence[Point]]
    stars: Sequence[Point] = ()


SHAPES = ("circle", "triangle", "square", "diamond")


def kind_look(kind: int) -> tuple[str, str]:
    """Colour and shape of the points of a kind; the first 32 all differ."""
    return f"s{kind % 8}", SHAPES[kind // 8 % len(SHAPES)]


def clouds(panels: Sequence[Cloud], kinds: Sequence[str], width: float, *, panel_width: float = 330) -> Drawing:
    """Clouds side by side with one key of kinds below; distances within a cloud say something, its axes do not."""
    columns = max(1, min(len(panels), round(width / panel_width)))
    gap = 14.0
    side = min((width - 8 - gap * (columns - 1)) / columns, 420.0)
    drawing = Drawing(width, 0)
    for place, panel in enumerate(panels):
        left, top = 4 + place % columns * (side + gap), 6 + place // columns * (side + 30)
        drawing.add(Words((left, top + 12), shorten(panel.title, side, TEXT), "ink", TEXT, bold=True))
        box = (left, top + 20, side, side)
        _cloud(drawing, panel, box)
        drawing.height = max(drawing.height, box[1] + side + 6)
    entries = [KeyEntry(kind, *_key_look(number)) for number, kind in enumerate(kinds)]
    drawing.height = key_rows(drawing, entries, drawing.height + 4, width)
    return drawing


def _key_look(kind: int) -> tuple[str, tuple[float, ...], str]:
    colour, shape = kind_look(kind)
    return colour, (), shape


def _cloud(drawing: Drawing, panel: Cloud, box: tuple[float, float, float, float]) -> None:
    left, top, width, height = box
    points = [point for group in panel.groups for point in group] + list(panel.stars)
    if not points:
        return
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    across, down = (
        Scale(min(xs), max(xs), left + 8, left + width - 8),
        Scale(min(ys), max(ys), top + height - 8, top + 8),
    )
    corners = [(left, top), (left + width, top), (left + width, top + height), (left, top + height), (left, top)]
    drawing.add(Line([corners], "grid"))
    for kind, group in enumerate(panel.groups):
        colour, shape = kind_look(kind)
        drawing.add(Dots([(across(x), down(y)) for x, y in group], colour, 1.9, shape, 0.75))
    for kind, (x, y) in enumerate(panel.stars):
        colour, shape = kind_look(kind)
        drawing.add(Dots([(across(x), down(y))], colour, 5, shape, rim="ink"))
