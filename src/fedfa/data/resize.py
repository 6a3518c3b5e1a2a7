"""Resizing of images in exact arithmetic, so that the result is bit-identical on every machine."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedfa.data.raw import Array

#: Weights are integers that sum to this. A byte times two such weights fits the 53 bits of a double, so every sum is
#: exact and does not depend on a library's order of summation.
_GRAIN = 1 << 14


def resize(images: Array, height: int, width: int) -> Array:
    """Resize ``uint8 [N, H, W, C]`` with a triangle filter, widened where the picture shrinks (no aliasing).

    Example:
        >>> resize(np.full((1, 16, 16, 3), 200, np.uint8), 28, 28).shape
        (1, 28, 28, 3)
    """
    if images.shape[1:3] == (height, width):
        return images
    rows, columns = _weights(images.shape[1], height), _weights(images.shape[2], width)
    result = np.empty((len(images), height, width, images.shape[3]), dtype=np.uint8)
    for start in range(0, len(images), 1024):
        block = images[start : start + 1024].astype(np.float64)
        block = np.einsum("ah,nhwc->nawc", rows, block, optimize=True)
        block = np.einsum("bw,nawc->nabc", columns, block, optimize=True)
        result[start : start + 1024] = np.floor(block / _GRAIN**2 + 0.5).clip(0, 255)
    return result


@lru_cache(maxsize=64)
def _weights(source: int, target: int) -> npt.NDArray[np.float64]:
    """``[target, source]`` integers whose rows sum to the grain."""
    scale = source / target
    reach = max(scale, 1.0)
    centres = (np.arange(target) + 0.5) * scale
    distance = np.abs(np.arange(source) + 0.5 - centres[:, None]) / reach
    exact = np.maximum(1 - distance, 0)
    exact *= _GRAIN / exact.sum(axis=1, keepdims=True)
    whole = np.floor(exact + 0.5)
    largest = whole.argmax(axis=1)
    whole[np.arange(target), largest] += _GRAIN - whole.sum(axis=1)  # rounding must not change the brightness
    return np.asarray(whole)
