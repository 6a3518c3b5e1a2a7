"""Painting of digits: random font, place, rotation, colours, background and blur, all from one stream."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedfa.data.rendering.glyphs import SIDE, Mask

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
        picture = sum(part * kernel[:, k, None, None, None] for k, part in enumerate(shifted))  # type: ignore[assignment]
    return picture
