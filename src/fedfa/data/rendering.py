"""Renderer of digits: outlines of matplotlib's fonts as large masks, painted in colours over backgrounds.

Only the unhinted outlines of the fonts are used, and filled here, so that neither the system's fonts nor the version of
a text renderer can change a pixel. Font, place, rotation, colours, background and blur are drawn from one stream.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedfa.data.optional_imports import import_optional
from fedfa.errors import DataError

Mask = npt.NDArray[np.float64]

#: Side of a mask; a centred digit is 64 high, which leaves a margin for outlines and rotation.
SIDE = 96
_HEIGHT = 64.0
_FINE = 4  # scan lines per row

#: Fonts with upright digits, included in matplotlib.
FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique",
    "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic",
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta",
    "cmr10", "cmb10", "cmss10", "cmtt10",
)  # fmt: skip


@cache
def digit_masks() -> Mask:
    """Coverage of every digit of every font, ``[fonts, 10, SIDE, SIDE]`` in [0, 1]."""
    folder = Path(_matplotlib("matplotlib").get_data_path()) / "fonts" / "ttf"
    masks = np.zeros((len(FONTS), 10, SIDE, SIDE))
    for font, name in enumerate(FONTS):
        path = folder / f"{name}.ttf"
        if not path.is_file():
            raise DataError(f"{path}: this font is part of matplotlib; reinstall matplotlib")
        for digit in range(10):
            masks[font, digit] = _fill(_contours(path, str(digit)))
    return masks


@cache
def thickened_masks(radius: int) -> Mask:
    """The same digits dilated by a disc, for outlines around them."""
    masks = digit_masks()
    grown = masks.copy()
    for down in range(-radius, radius + 1):
        for right in range(-radius, radius + 1):
            if down**2 + right**2 <= radius**2:
                np.maximum(grown, np.roll(masks, (down, right), axis=(-2, -1)), out=grown)
    return grown


def _matplotlib(module: str) -> Any:
    return import_optional(module, "rendering synth-digits", extra="plots")


def _contours(path: Path, text: str) -> list[Mask]:
    """Closed polygons of a character, scaled and centred on the mask, with y pointing down."""
    properties = _matplotlib("matplotlib.font_manager").FontProperties(fname=str(path))
    outline = _matplotlib("matplotlib.textpath").TextPath((0, 0), text, size=100, prop=properties)
    polygons = _flatten(np.asarray(outline.vertices, dtype=np.float64), np.asarray(outline.codes))
    points = np.concatenate(polygons)
    low, high = points.min(axis=0), points.max(axis=0)
    scale = _HEIGHT / (high[1] - low[1])
    scale = min(scale, 0.8 * SIDE / (high[0] - low[0]))
    middle = (low + high) / 2
    return [(polygon - middle) * scale * (1, -1) + SIDE / 2 for polygon in polygons]


def _flatten(vertices: Mask, codes: npt.NDArray[Any]) -> list[Mask]:
    """Approximate curves by short lines. Codes are matplotlib's: 1 move, 2 line, 3 and 4 Bézier curves, 79 close."""
    polygons: list[list[Mask]] = []
    steps = np.linspace(0, 1, 9)[1:, None]
    position = 0
    while position < len(codes):
        code, point = codes[position], vertices[position]
        if code == 1:
            polygons.append([point])
        elif code == 2:
            polygons[-1].append(point)
        elif code in (3, 4):
            control = [polygons[-1][-1], *vertices[position : position + code - 1]]
            while len(control) > 1:  # de Casteljau, for all steps at once
                control = [a * (1 - steps) + b * steps for a, b in pairwise(control)]
            polygons[-1].extend(control[0])
            position += code - 2
        position += 1
    return [np.array(polygon) for polygon in polygons]


def _fill(polygons: list[Mask]) -> Mask:
    """Coverage of each pixel: exact along a scan line, averaged over the scan lines of a row."""
    starts = np.concatenate(polygons)
    ends = np.concatenate([np.roll(polygon, -1, axis=0) for polygon in polygons])
    heights = (np.arange(SIDE * _FINE) + 0.5) / _FINE
    (x0, y0), (x1, y1) = starts.T, ends.T
    upward = (y0[:, None] <= heights) & (heights < y1[:, None])
    downward = (y1[:, None] <= heights) & (heights < y0[:, None])
    edge, line = np.nonzero(upward | downward)
    turn = np.where(upward[edge, line], 1.0, -1.0)
    cross = x0[edge] + (heights[line] - y0[edge]) * (x1[edge] - x0[edge]) / (y1[edge] - y0[edge])
    # Right of a crossing the winding number changes by one; a crossed pixel changes in part.
    change = turn[:, None] * np.clip(np.arange(1, SIDE + 1) - cross[:, None], 0, 1)
    winding = np.zeros((SIDE * _FINE, SIDE))
    np.add.at(winding, line, change)
    return np.asarray(np.clip(np.abs(winding), 0, 1).reshape(SIDE, _FINE, SIDE).mean(axis=1))


#: Side of a picture.
PICTURE = 32
Rng = np.random.Generator
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def paint(labels: Ints, masks: Mask, grown: Mask, rng: Rng) -> npt.NDArray[np.uint8]:
    """Paint one picture per label, ``uint8 [N, 32, 32, 3]``; ``grown`` are thickened masks, for outlines."""
    count = len(labels)
    fonts = rng.integers(len(masks), size=count)
    places = _Places(count, rng)
    outlined = np.flatnonzero(rng.random(count) < 0.3)
    digit, edge = np.zeros((2, count, PICTURE, PICTURE))
    digit[:] = places.sample(masks, fonts, labels, np.arange(count))
    edge[outlined] = places.sample(grown, fonts, labels, outlined)
    for side in (-1, 1):  # neighbours to the left and right, as in a number on a sign
        beside = np.flatnonzero(rng.random(count) < 0.4)
        others, shift = rng.integers(10, size=count), side * 52 * rng.uniform(0.85, 1.1, count)
        for layer, source, who in ((digit, masks, beside), (edge, grown, np.intersect1d(beside, outlined))):
            layer[who] = np.maximum(layer[who], places.sample(source, fonts, others, who, shift))

    picture, average = _backgrounds(count, rng)
    ink = _contrasting(average, rng)
    line = _contrasting(ink, rng)
    picture = _blend(_blend(picture, line, edge), ink, digit)
    picture = _blur(picture, rng.uniform(0.2, 1.1, count))
    picture += rng.normal(0, 1, picture.shape) * rng.uniform(0, 0.05, count)[:, None, None, None]
    return np.floor(np.clip(picture, 0, 1) * 255 + 0.5).astype(np.uint8)


class _Places:
    """Position of each digit: a map from the picture's pixels to the mask, four points per pixel."""

    def __init__(self, count: int, rng: Rng) -> None:
        turn = np.deg2rad(rng.uniform(-25, 25, count))
        height = rng.uniform(16, 26, count)  # in pixels of the picture
        width = height * rng.uniform(0.75, 1.2, count)
        slant = rng.uniform(-0.25, 0.25, count)
        move = rng.uniform(-3, 3, (count, 2))
        fine = (np.arange(2 * PICTURE) + 0.5) / 2 - PICTURE / 2
        across = fine[None, None, :] - move[:, :1, None]
        down = fine[None, :, None] - move[:, 1:, None]
        cos, sin = np.cos(turn)[:, None, None], np.sin(turn)[:, None, None]
        u, v = cos * across + sin * down, cos * down - sin * across
        self._v = v * (64 / height)[:, None, None] + SIDE / 2 - 0.5
        self._u = (u + slant[:, None, None] * v) * (64 / width)[:, None, None] + SIDE / 2 - 0.5

    def sample(self, masks: Mask, fonts: Ints, digits: Ints, who: Ints, shift: Floats | None = None) -> Floats:
        """Coverage ``[len(who), 32, 32]`` of a digit in the pictures ``who``, shifted sideways in units of the mask."""
        u = self._u[who] if shift is None else self._u[who] - shift[who, None, None]
        # The border of every mask is empty, so points outside may be read there.
        u, v = u.clip(0, SIDE - 1.5), self._v[who].clip(0, SIDE - 1.5)
        left, top = u.astype(np.int64), v.astype(np.int64)
        u -= left
        v -= top
        flat = masks.reshape(-1)
        corner = (fonts[who] * 10 + digits[who])[:, None, None] * (SIDE * SIDE) + top * SIDE + left
        upper = flat[corner] * (1 - u) + flat[corner + 1] * u
        lower = flat[corner + SIDE] * (1 - u) + flat[corner + SIDE + 1] * u
        value = upper * (1 - v) + lower * v
        return np.asarray(value.reshape(len(who), PICTURE, 2, PICTURE, 2).mean(axis=(2, 4)))


def _backgrounds(count: int, rng: Rng) -> tuple[Floats, Floats]:
    """A gradient between two colours under large blotches; and the average colour."""
    first, second = rng.random((2, count, 3))
    second = np.where(rng.random((count, 1)) < 0.4, first, second)  # many signs have one plain colour
    second = first + 0.6 * (second - first)
    angle = rng.uniform(0, 2 * np.pi, count)[:, None, None]
    ticks = np.linspace(-0.5, 0.5, PICTURE)
    ramp = np.clip(0.5 + np.cos(angle) * ticks[None, None, :] + np.sin(angle) * ticks[None, :, None], 0, 1)
    picture = first[:, None, None] + (second - first)[:, None, None] * ramp[..., None]
    coarse = rng.normal(0, 1, (count, 6, 6, 3))
    positions = np.linspace(0, 5, PICTURE)
    hat = np.maximum(1 - np.abs(positions[:, None] - np.arange(6)), 0)
    blotches = (hat[None, :, :, None, None] * coarse[:, None]).sum(axis=2)  # rows
    blotches = (hat[None, None, :, :, None] * blotches[:, :, None]).sum(axis=3)  # columns
    strength = rng.uniform(0, 0.12, count) * (rng.random(count) < 0.7)
    return picture + blotches * strength[:, None, None, None], (first + second) / 2


def _contrasting(against: Floats, rng: Rng) -> Floats:
    """Colours whose brightness differs from the given ones by a quarter of the range or more."""
    light = np.array([0.299, 0.587, 0.114])
    colours = rng.random(against.shape)
    for _ in range(30):
        close = np.abs(((colours - against) * light).sum(axis=1)) < 0.25
        if not close.any():
            break
        colours = np.where(close[:, None], rng.random(against.shape), colours)
    return colours


def _blend(picture: Floats, colours: Floats, cover: Floats) -> Floats:
    return picture + (colours[:, None, None, :] - picture) * cover[..., None]


def _blur(picture: Floats, sigma: Floats) -> Floats:
    """A Gaussian blur with a separate width for each picture; the border is repeated."""
    reach = np.arange(-3, 4)
    kernel = np.exp(-0.5 * (reach / sigma[:, None]) ** 2)
    kernel /= kernel.sum(axis=1, keepdims=True)
    for axis in (1, 2):
        pad = [(0, 0)] * 4
        pad[axis] = (3, 3)
        padded = np.pad(picture, pad, mode="edge")
        shifted = (np.take(padded, np.arange(k, k + PICTURE), axis=axis) for k in range(7))
        # `sum` is typed as possibly 0, for an empty sequence.
        picture = sum(part * kernel[:, k, None, None, None] for k, part in enumerate(shifted))  # type: ignore[assignment]  # sum of arrays
    return picture
