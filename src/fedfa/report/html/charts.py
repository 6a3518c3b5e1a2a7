"""Kinds of charts: lines, small multiples of lines, heat maps, clouds of points. They know numbers, not runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedfa.report.html.drawing import Area, Boxes, Dots, Drawing, Line, Point, Words, shorten, text_width
from fedfa.report.html.palette import STEPS, Style, step_role

SMALL, TEXT = 11.0, 12.0
"""Sizes of letters in pixels: marks of axes, everything else."""
WIDE, HALF, NARROW = 920.0, 446.0, 344.0
"""Widths of drawings: over the whole page, half of it, on a telephone."""


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
    log: bool = False


@dataclass(frozen=True)
class Panel:
    """One of several charts with the same axes: its own lines, in front of grey ones."""

    title: str
    series: Sequence[Series]
    behind: Sequence[Series] = ()


@dataclass(frozen=True)
class Table:
    """The numbers of a chart, for readers and programs that want them."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A chart with all that a page and a file need of it."""

    name: str
    """Of its files."""
    title: str
    caption: str
    alt: str
    """What one sees, in words."""
    wide: Drawing
    narrow: Drawing
    hover: Sequence[Any] = ()
    """For each panel, the values a pointer reads."""
    table: Table | None = None
    half: bool = False


# -- numbers ----------------------------------------------------------------------------------------------------------
def number(value: float | None, digits: int | None = None) -> str:
    """A number for people: as many digits as say something.

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


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that divide a range.

    Example:
        >>> ticks(0, 50, 5)
        [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float, step: float) -> str:
    """A tick's words: no more digits than the steps need.

    Example:
        >>> tick_text(2500.0, 500), tick_text(0.5, 0.25)
        ('2,500', '0.50')
    """
    if abs(value) >= 1e7:
        return f"{value:.0e}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    if step > 0 and round(step * 10**digits, 6) % 1 > 1e-6:
        digits += 1
    return f"{value:,.{digits}f}"


@dataclass(frozen=True)
class _Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return self.start + (value - low) / ((high - low) or 1) * (self.end - self.start)


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
    left = 12 + max(text_width(tick_text(t, _step(y_range, 5)), SMALL) for t in ticks(*y_range, 5))
    box = (left, top, width - room - left, bottom - top)
    _, down = _frame(drawing, box, x, y, shown, y_range, panel=0)
    drawing.add(Words((4, 14), y.label, "muted", TEXT))
    if names:
        _names(drawing, shown, labels, box, down)
    return drawing


@dataclass(frozen=True)
class KeyEntry:
    """A name with the look it stands for: a line, or a mark where it has a shape."""

    name: str
    colour: str
    dash: tuple[float, ...] = ()
    shape: str | None = None
    series: int | None = None


def key_rows(drawing: Drawing, entries: Sequence[KeyEntry], top: float, width: float) -> float:
    """Names with their looks, in as many rows as they need; returns the bottom."""
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
        drawing.add(Words((x + 25, y), text, "ink", TEXT, series=entry.series))
        x += wide
    return y + 10


def multiples(panels: Sequence[Panel], x: Axis, y: Axis, width: float, *, panel_width: float = 240) -> Drawing:
    """Small charts of equal axes in rows, each with a title."""
    columns = max(1, min(len(panels), round(width / panel_width)))
    rows = math.ceil(len(panels) / columns)
    everything = [one for panel in panels for one in (*panel.series, *panel.behind)]
    y_range = _range(y, _heights(everything), 4)
    left = 12 + max(text_width(tick_text(t, _step(y_range, 4)), SMALL) for t in ticks(*y_range, 4))
    gap, inner = 22.0, 118.0 if width > NARROW else 96.0
    each = min((width - left - gap * columns) / columns, 1.6 * panel_width)
    pitch = inner + 46
    drawing = Drawing(width, rows * pitch + 34)
    drawing.add(Words((4, 14), y.label, "muted", TEXT))
    for place, panel in enumerate(panels):
        column, row = place % columns, place // columns
        box = (left + column * (each + gap), 44 + row * pitch, each, inner)
        last_row = place + columns >= len(panels)
        frame_x = x if last_row else Axis("", x.low, x.high, x.whole, x.log)
        _frame(
            drawing, box, frame_x, y, panel.series, y_range, panel=place, behind=panel.behind, everything=everything,
            y_marks=column == 0, about=(3, 4),
        )  # fmt: skip
        drawing.add(Words((box[0], box[1] - 7), shorten(panel.title, each, TEXT), "ink", TEXT, bold=True))
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


def _step(ends: tuple[float, float], about: int) -> float:
    marks = ticks(*ends, about)
    return marks[1] - marks[0] if len(marks) > 1 else 1.0


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
) -> tuple[_Scale, _Scale]:
    """Axes and lines in a box; returns how values become pixels."""
    left, top, width, height = box
    bottom = top + height
    of = [one for one in (everything or [*series, *behind]) if one.points]
    across_values = [p[0] for one in of for p in one.points] + [one.after[0] for one in of if one.after]
    low = min(across_values, default=0.0) if x.low is None else x.low
    high = max(across_values, default=1.0) if x.high is None else x.high
    if high <= low:
        high = low + 1
    across, down = _Scale(low, high, left, left + width, x.log), _Scale(*y_range, bottom, top)
    for mark in ticks(*y_range, about[1]):
        drawing.add(Line([[(left, down(mark)), (left + width, down(mark))]], "grid"))
        if y_marks:
            text = tick_text(mark, _step(y_range, about[1]))
            drawing.add(Words((left - 6, down(mark) + 4), text, "muted", SMALL, "end"))
    drawing.add(Line([[(left, bottom), (left + width, bottom)]], "faint"))
    marks = _log_ticks(low, high) if x.log else ticks(low, high, max(2, min(about[0], int(width / 58))))
    for mark in marks:
        if x.whole and mark != int(mark):
            continue
        drawing.add(Line([[(across(mark), bottom), (across(mark), bottom + 4)]], "faint"))
        text = number(mark) if x.log else tick_text(mark, _step((low, high), max(2, min(about[0], int(width / 58)))))
        drawing.add(Words((across(mark), bottom + 17), text, "muted", SMALL, "middle"))
    if x.label:
        drawing.add(Words((left + width, bottom + 33), x.label, "muted", TEXT, "end"))
    for one in behind:
        if one.points:
            drawing.add(Line([[(across(a), down(b)) for a, b in one.points]], "faint", 1.0, opacity=0.8))
    for place, one in enumerate(series):
        _draw_series(drawing, one, place, across, down, small=bool(behind) or width < 260)
    drawing.plots.append(
        {"k": "line", "p": panel, "r": [round(v, 1) for v in box], "x": [low, high], "y": list(y_range), "l": x.log}
    )
    return across, down


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 300 else (1,)
    return [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]


def _draw_series(drawing: Drawing, one: Series, place: int, across: _Scale, down: _Scale, *, small: bool) -> None:
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
    down: _Scale,
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
                    [_short(a), _short(b), *([_short(v) for v in one.band[i]] if one.band else [])]
                    for i, (a, b) in enumerate(one.points)
                ],
                **({"after": [_short(v) for v in one.after]} if one.after else {}),
            }
            for one in series
        ],
    }  # fmt: skip


def _short(value: float) -> float:
    """Five digits are more than a pointer can tell apart."""
    return float(f"{value:.5g}")


# -- heat maps --------------------------------------------------------------------------------------------------------
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
        values = [[None if v is None else _short(v) for v in row] for row in self.values]
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
    numbers = all(name.replace(",", "").isdigit() for name in heat.columns)
    if longest + 6 <= wide or numbers:
        every = max(1, math.ceil((longest + 10) / wide))
        for c, name in enumerate(heat.columns):
            if c % every == 0:
                drawing.add(Words((left + (c + 0.5) * wide, bottom + 14), name, "muted", SMALL, "middle"))
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


def _on(role: str) -> str:
    """The colour of letters on a step of a scale."""
    step = int(role[1:])
    dark = step >= 5 if role[0] == "q" else step <= 1 or step >= 7
    return "surface" if dark else "ink"


# -- clouds of points -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cloud:
    """Points in the plane, a group for each kind; ``stars``, one for each kind, are marked apart."""

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
        _Scale(min(xs), max(xs), left + 8, left + width - 8),
        _Scale(min(ys), max(ys), top + height - 8, top + 8),
    )
    corners = [(left, top), (left + width, top), (left + width, top + height), (left, top + height), (left, top)]
    drawing.add(Line([corners], "grid"))
    for kind, group in enumerate(panel.groups):
        colour, shape = kind_look(kind)
        drawing.add(Dots([(across(x), down(y)) for x, y in group], colour, 1.9, shape, 0.75))
    for kind, (x, y) in enumerate(panel.stars):
        drawing.add(Dots([(across(x), down(y))], kind_look(kind)[0], 6, "cross", rim="ink"))
