"""Picture files, and folders with one sub-folder of pictures for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfa.data.formats.untrusted_files import reading
from fedfa.data.optional_imports import import_optional
from fedfa.data.raw import Array
from fedfa.errors import DataError


def read_picture(path: Path, mode: str = "RGB") -> Array:
    """Read a picture as ``uint8 [H, W, 3]``, or ``[H, W]`` with ``mode = "L"``; grey ones of 16 bits as ``uint16``.

    Raises:
        DataError: It cannot be read, or not without a loss of depth.
    """
    image = import_optional("PIL.Image", f"reading {path.name}")
    with reading(path), image.open(path) as picture:
        if picture.mode.startswith("I"):
            values = np.asarray(picture)
            if values.min(initial=0) < 0 or values.max(initial=0) > 65535:
                raise DataError(f"{path}: its values run from {values.min()} to {values.max()}, beyond 16 bits")
            return values.astype(np.uint16)
        if picture.mode == "F" or _has_16_bit_colours(path):
            kind = "floating-point numbers" if picture.mode == "F" else "16-bit colours"
            raise DataError(
                f"{path}: holds {kind}, which would be reduced to 8 bits; give the pictures as arrays, or save them "
                "with 8 bits per channel or as grey pictures of 16 bits"
            )
        return np.asarray(picture.convert(mode))


def _has_16_bit_colours(path: Path) -> bool:
    """Whether a PNG file has 16 bits per colour, which Pillow reduces to 8 without a word."""
    with path.open("rb") as file:
        head = file.read(26)
    return head.startswith(b"\x89PNG") and len(head) == 26 and head[24] == 16 and head[25] in (2, 6)


def read_mosaic(path: Path, size: int = 32, across: int = 100) -> Array:
    """Read a picture that is a grid of square RGB images, filled row by row."""
    pixels = read_picture(path)
    height, width = pixels.shape[:2]
    if width != size * across or height % size:
        raise DataError(f"{path}: {width}×{height} pixels are not rows of {across} images of {size}×{size}")
    tiles = pixels.reshape(-1, size, across, size, 3).swapaxes(1, 2)
    return np.ascontiguousarray(tiles.reshape(-1, size, size, 3))


PICTURE_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".pgm", ".ppm"}


ReadSamples = tuple[Array, Array, tuple[str, ...]]
"""Pictures, labels, and the names of the classes in alphabetical order."""


def read_class_folders(folder: Path) -> tuple[ReadSamples, ReadSamples | None, ReadSamples | None]:
    """Read ``folder/CLASS/*.png``, or ``folder/train/CLASS/*`` with ``folder/test/CLASS/*`` and ``folder/val/CLASS/*``.

    Returns:
        Training, test and validation samples, the latter two where they are. A validation part without a test part is
        the test part.
    """
    if not (folder / "train").is_dir():
        return _read_part(folder, None), None, None
    train = _read_part(folder / "train", None)
    second = [folder / name for name in ("test", "val", "valid", "validation") if (folder / name).is_dir()]
    parts: list[ReadSamples | None] = [_read_part(path, train[2]) for path in second[:2]]
    test, validation = [*parts, None, None][:2]
    return train, test, validation


def _read_part(folder: Path, names: tuple[str, ...] | None) -> ReadSamples:
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
            if path.suffix.lower() not in PICTURE_ENDINGS:
                continue
            image = read_picture(path)
            first = first or path
            if images and image.dtype != images[0].dtype:
                raise DataError(
                    f"{path}: {8 * image.dtype.itemsize} bits per pixel, but {first} has "
                    f"{8 * images[0].dtype.itemsize}; all pictures must have one depth"
                )
            if images and image.shape != images[0].shape:
                raise DataError(
                    f"{path}: {image.shape[1]}×{image.shape[0]} pixels, but {first} has "
                    f"{images[0].shape[1]}×{images[0].shape[0]}; all pictures must have one size"
                )
            images.append(image)
            labels.append(label)
    if not images:
        raise DataError(
            f"{folder}: no pictures in its class folders (known file types: {' '.join(sorted(PICTURE_ENDINGS))})"
        )
    stacked = np.stack(images)
    if stacked.ndim == 4 and np.array_equal(stacked[..., :2], stacked[..., 1:]):
        stacked = stacked[..., :1]  # grey pictures keep one channel
    return stacked, np.array(labels), names
