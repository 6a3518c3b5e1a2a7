"""Digits of matplotlib's fonts as large masks.

Only the unhinted outlines of the fonts are used, and filled here, so that neither the system's fonts nor the version of
a text renderer can change a pixel.
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
