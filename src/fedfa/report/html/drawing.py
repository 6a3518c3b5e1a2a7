"""Drawings: lists of marks in pixels, coloured by role; rendered as SVG for the page, or as SVG and PNG files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from io import BytesIO
from typing import Any

from fedfa.errors import FedfaError
from fedfa.report.html.palette import LIGHT

Point = tuple[float, float]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class _Mark:
    series: int | None = field(default=None, kw_only=True)
    """Index of the series in its chart, by which the page's script finds the mark."""
    opacity: float = field(default=1.0, kw_only=True)


@dataclass(frozen=True)
class Line(_Mark):
    """One polyline or several."""

    strokes: Sequence[Sequence[Point]]
    colour: str
    width: float = 1.0
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Area(_Mark):
    """A filled polygon."""

    outline: Sequence[Point]
    colour: str


@dataclass(frozen=True)
class Boxes(_Mark):
    """Rectangles of one colour: left, top, width, height."""

    boxes: Sequence[tuple[float, float, float, float]]
    colour: str


@dataclass(frozen=True)
class Dots(_Mark):
    """Markers of one shape and colour."""

    points: Sequence[Point]
    colour: str
    radius: float = 3.0
    shape: str = "circle"
    rim: str | None = None


@dataclass(frozen=True)
class Text(_Mark):
    """A line of text; ``at`` lies on its baseline, ``anchor`` is start, middle or end."""

    at: Point
    text: str
    colour: str = "muted"
    size: float = 12.0
    anchor: str = "start"
    bold: bool = False
    turned: bool = False


Mark = Line | Area | Boxes | Dots | Text


@dataclass
class Drawing:
    """Marks on a canvas; ``plots`` are the areas in which the pointer shows values."""

    width: float
    height: float
    marks: list[Mark] = field(default_factory=list)
    plots: list[dict[str, Any]] = field(default_factory=list)

    def add(self, *marks: Mark) -> None:
        """Add marks on top."""
        self.marks.extend(marks)


def text_width(text: str, size: float = 12.0) -> float:
    """Upper estimate of the width of a text; fonts differ.

    Example:
        >>> text_width("fedfa", 10) > 5 * 5
        True
    """
    return sum(0.36 if c in "iljtf.,:;'| " else 0.92 if c in "mwMW@%" else 0.63 for c in text) * size


def shorten(text: str, width: float, size: float = 12.0) -> str:
    """Cut a text to a width, but keep the part after its last comma if that is short.

    The titles of a method's panels differ only in the round, which stands last.

    Example:
        >>> shorten("a rather long name", 60, 12)
        'a rathe…'
        >>> shorten("a rather long name, round 3", 120, 12)
        'a rather…, round 3'
    """
    if text_width(text, size) <= width:
        return text
    text, comma, last = text.rpartition(", ")
    end = "…" + comma + last
    if not comma or text_width(end, size) > 2 / 3 * width:
        text, end = text + comma + last, "…"
    while text and text_width(text + end, size) > width:
        text = text[:-1]
    return text.rstrip() + end


def shape_outline(shape: str, x: float, y: float, r: float) -> list[Point]:
    """Corners of a marker that is not a circle."""
    if shape == "triangle":
        return [(x, y - 1.2 * r), (x + 1.1 * r, y + 0.8 * r), (x - 1.1 * r, y + 0.8 * r)]
    if shape == "square":
        return [(x + a * r, y + b * r) for a, b in ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9))]
    return [(x, y - 1.3 * r), (x + 1.3 * r, y), (x, y + 1.3 * r), (x - 1.3 * r, y)]  # diamond


# -- SVG --------------------------------------------------------------------------------------------------------------
def inline_svg(drawing: Drawing, title: str, description: str, *, css: str, label: str) -> str:
    """SVG for a page; colours are CSS variables of the page's theme, ``label`` is unique on the page."""
    plots = escape(json.dumps(drawing.plots, separators=(",", ":")))
    return (
        f'<svg class="{css}" viewBox="0 0 {_n(drawing.width)} {_n(drawing.height)}" role="img" '
        f'aria-labelledby="{label}-t {label}-d" data-plots="{plots}">'
        f'<title id="{label}-t">{escape(title)}</title><desc id="{label}-d">{escape(description)}</desc>'
        f"{_body(drawing, lambda role: f'var(--{role})')}</svg>"
    )


def file_svg(drawing: Drawing, title: str, description: str) -> str:
    """Self-contained SVG for a file, in the light theme."""
    size = f'width="{_n(drawing.width)}" height="{_n(drawing.height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_n(drawing.width)} {_n(drawing.height)}" '
        f'role="img" font-family="{escape(FONT)}"><title>{escape(title)}</title><desc>{escape(description)}</desc>'
        f'<rect width="100%" height="100%" fill="{LIGHT["surface"]}"/>'
        f"{_body(drawing, LIGHT.__getitem__)}</svg>\n"
    )


def _n(value: float) -> str:
    """Format a coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def _body(drawing: Drawing, colour: Callable[[str], str]) -> str:
    return "".join(_svg_mark(mark, colour) for mark in drawing.marks)


def _svg_mark(mark: Mark, colour: Callable[[str], str]) -> str:
    paint = colour(mark.colour)
    series = "" if mark.series is None else f' data-s="{mark.series}"'
    if isinstance(mark, Text):
        turn = f' transform="rotate(-90 {_n(mark.at[0])} {_n(mark.at[1])})"' if mark.turned else ""
        weight = ' font-weight="600"' if mark.bold else ""
        anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
        return (
            f'<text x="{_n(mark.at[0])}" y="{_n(mark.at[1])}" font-size="{_n(mark.size)}" style="fill:{paint}"'
            f"{anchor}{weight}{turn}{series}>{escape(mark.text)}</text>"
        )
    kind = "stroke" if isinstance(mark, Line) else "fill"
    fade = "" if mark.opacity == 1 else f";{kind}-opacity:{mark.opacity:g}"
    if isinstance(mark, Line):
        dash = f";stroke-dasharray:{' '.join(map(_n, mark.dash))}" if mark.dash else ""
        d = "".join("M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in stroke) for stroke in mark.strokes if stroke)
        return (
            f'<path d="{d}" fill="none" stroke-linejoin="round" '
            f'style="stroke:{paint};stroke-width:{_n(mark.width)}{dash}{fade}"{series}/>'
        )
    if isinstance(mark, Area):
        d = _polygon(mark.outline)
        return f'<path d="{d}" style="fill:{paint}{fade}"{series}/>'
    if isinstance(mark, Boxes):
        d = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in mark.boxes)
        return f'<path d="{d}" style="fill:{paint}{fade}"{series}/>'
    rim = f";stroke:{colour(mark.rim)};stroke-width:1.2" if mark.rim else ""
    if mark.shape == "circle":
        r, wide = _n(mark.radius), _n(2 * mark.radius)
        ring = f"a{r} {r} 0 1 0 {wide} 0a{r} {r} 0 1 0 -{wide} 0z"
        d = "".join(f"M{_n(x - mark.radius)} {_n(y)}{ring}" for x, y in mark.points)
    else:
        d = "".join(_polygon(shape_outline(mark.shape, x, y, mark.radius)) for x, y in mark.points)
    return f'<path d="{d}" style="fill:{paint}{rim}{fade}"{series}/>'


def _polygon(outline: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in outline) + "z"


# -- PNG --------------------------------------------------------------------------------------------------------------
def file_png(drawing: Drawing) -> bytes:
    """Render a drawing as PNG, in the light theme.

    Raises:
        FedfaError: matplotlib is not installed.
    """
    figure = matplotlib_figure(figsize=(drawing.width / 100, drawing.height / 100), facecolor=LIGHT["surface"])
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    for order, mark in enumerate(drawing.marks):
        _paint(axes, mark, order)
    out = BytesIO()
    figure.savefig(out, format="png", dpi=200, metadata={"Software": None})
    return out.getvalue()


def matplotlib_figure(**options: Any) -> Any:
    """Create a matplotlib figure.

    Raises:
        FedfaError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FedfaError("pictures need matplotlib: pip install 'fedfa[plots]'") from None
    return Figure(**options)


_POINTS = 0.72
"""Typographic points per pixel, at a hundred pixels per inch."""


def _paint(axes: Any, mark: Mark, order: int) -> None:
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.patches import Circle, Polygon, Rectangle

    line_style: dict[str, Any]
    paint = LIGHT[mark.colour]
    if isinstance(mark, Text):
        axes.text(
            *mark.at, mark.text, color=paint, fontsize=mark.size * _POINTS * 0.95, zorder=order, va="baseline",
            ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor], parse_math=False,
            fontweight="bold" if mark.bold else "normal", rotation=90 if mark.turned else 0, rotation_mode="anchor",
        )  # fmt: skip
    elif isinstance(mark, Line):
        dash = (0, [part / max(mark.width, 1) for part in mark.dash]) if mark.dash else "solid"
        strokes = [list(stroke) for stroke in mark.strokes if stroke]
        line_style = {"colors": paint, "linewidths": mark.width * _POINTS, "linestyles": [dash], "joinstyle": "round"}
        axes.add_collection(LineCollection(strokes, alpha=mark.opacity, zorder=order, **line_style), autolim=False)
    else:
        patches: list[Any]
        if isinstance(mark, Area):
            patches = [Polygon(mark.outline)]
        elif isinstance(mark, Boxes):
            patches = [Rectangle((x, y), w, h) for x, y, w, h in mark.boxes]
        elif mark.shape == "circle":
            patches = [Circle(point, mark.radius) for point in mark.points]
        else:
            patches = [Polygon(shape_outline(mark.shape, x, y, mark.radius)) for x, y in mark.points]
        edge = LIGHT[mark.rim] if isinstance(mark, Dots) and mark.rim else "none"
        line_style = {"facecolor": paint, "edgecolor": edge, "lw": 0.9, "alpha": mark.opacity, "zorder": order}
        axes.add_collection(PatchCollection(patches, **line_style), autolim=False)
