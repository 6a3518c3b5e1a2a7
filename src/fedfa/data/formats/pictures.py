"""Readers of picture files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfa.data.formats.untrusted_files import reading
from fedfa.data.optional_imports import import_optional
from fedfa.data.raw import Array
from fedfa.errors import DataError


def read_picture(path: Path, mode: str = "RGB") -> Array:
    """Read a picture as ``uint8 [H, W, 3]``, or ``[H, W]`` with ``mode = "L"``."""
    image = import_optional("PIL.Image", f"reading {path.name}")
    with reading(path), image.open(path) as picture:
        return np.asarray(picture.convert(mode))


def read_mosaic(path: Path, size: int = 32, across: int = 100) -> Array:
    """Read a picture that is a grid of square RGB images, filled row by row."""
    pixels = read_picture(path)
    height, width = pixels.shape[:2]
    if width != size * across or height % size:
        raise DataError(f"{path}: {width}×{height} pixels are not rows of {across} images of {size}×{size}")
    tiles = pixels.reshape(-1, size, across, size, 3).swapaxes(1, 2)
    return np.ascontiguousarray(tiles.reshape(-1, size, size, 3))
