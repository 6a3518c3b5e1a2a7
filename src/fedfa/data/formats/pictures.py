"""Picture files, and folders with one sub-folder of pictures for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfa.data.formats.untrusted_files import reading
from fedfa.data.optional_imports import import_optional
from fedfa.data.raw import Array, RawSamples
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


_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".pgm", ".ppm"}


def read_class_folders(folder: Path) -> tuple[RawSamples, RawSamples | None, tuple[str, ...]]:
    """Read ``folder/CLASS/*.png``, or ``folder/train/CLASS/*`` with ``folder/test/CLASS/*``.

    Returns:
        Training samples, test samples if there are any, and the names of the classes in alphabetical order.
    """
    if not (folder / "train").is_dir():
        train, names = _read_part(folder, None)
        return train, None, names
    train, names = _read_part(folder / "train", None)
    for second in ("test", "val", "valid"):
        if (folder / second).is_dir():
            return train, _read_part(folder / second, names)[0], names
    return train, None, names


def _read_part(folder: Path, names: tuple[str, ...] | None) -> tuple[RawSamples, tuple[str, ...]]:
    found = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    names = names or found
    if not found:
        raise DataError(f"{folder}: no class folders; expected one folder of pictures for each class")
    unknown = [name for name in found if name not in names]
    if unknown:
        raise DataError(f"{folder}: the class {unknown[0]!r} is not among the training classes {', '.join(names)}")
    images: list[Array] = []
    labels: list[int] = []
    first: Path | None = None
    for label, name in enumerate(names):
        class_folder = folder / name
        for path in sorted(class_folder.iterdir()) if class_folder.is_dir() else ():
            if path.suffix.lower() not in _ENDINGS:
                continue
            image = read_picture(path)
            first = first or path
            if images and image.shape != images[0].shape:
                raise DataError(
                    f"{path}: {image.shape[1]}×{image.shape[0]} pixels, but {first} has "
                    f"{images[0].shape[1]}×{images[0].shape[0]}; all pictures must have one size"
                )
            images.append(image)
            labels.append(label)
    if not images:
        raise DataError(f"{folder}: no pictures in its class folders (known file types: {' '.join(sorted(_ENDINGS))})")
    stacked = np.stack(images)
    if np.array_equal(stacked[..., 0], stacked[..., 1]) and np.array_equal(stacked[..., 1], stacked[..., 2]):
        stacked = stacked[..., :1]  # grey pictures keep one channel
    return RawSamples(stacked, np.array(labels)), names
