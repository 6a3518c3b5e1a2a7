"""Picture files to arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfa.data.decoded import Array
from fedfa.data.formats.files import naming
from fedfa.data.optional import needs
from fedfa.errors import DataError


def read_picture(path: Path, mode: str = "RGB") -> Array:
    """Read a picture as ``uint8 [H, W, 3]``, or ``[H, W]`` with ``mode = "L"``."""
    image = needs("PIL.Image", f"reading {path.name}")
    with naming(path), image.open(path) as picture:
        return np.asarray(picture.convert(mode))


def read_mosaic(path: Path, size: int = 32, across: int = 100) -> Array:
    """Read a picture that is a grid of square RGB images, filled row by row."""
    pixels = read_picture(path)
    height, width = pixels.shape[:2]
    if width != size * across or height % size:
        raise DataError(f"{path}: {width}×{height} pixels are not rows of {across} images of {size}×{size}")
    tiles = pixels.reshape(-1, size, across, size, 3).swapaxes(1, 2)
    return np.ascontiguousarray(tiles.reshape(-1, size, size, 3))
