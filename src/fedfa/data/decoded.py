"""Samples as arrays in memory, between the reading of a source and the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedfa.errors import DataError

Array = npt.NDArray[Any]


@dataclass
class Arrays:
    """One part of a data set: inputs ``uint8 [N, H, W, C]`` or ``float32``, labels and, where known, owners."""

    inputs: Array
    labels: Array
    domains: Array | None = None
    writers: Array | None = None

    def __post_init__(self) -> None:
        if self.inputs.dtype == np.uint8 and self.inputs.ndim == 3:
            self.inputs = self.inputs[..., None]  # grey images get their one channel
        self.inputs = np.ascontiguousarray(self.inputs)
        self.labels = np.ascontiguousarray(self.labels, dtype=np.int64)
        if self.domains is not None:
            self.domains = np.ascontiguousarray(self.domains, dtype=np.int64)
        if self.writers is not None:
            self.writers = np.ascontiguousarray(self.writers, dtype=np.int64)

    def named(self) -> Iterator[tuple[str, Array]]:
        """The arrays that are there, with their names."""
        for name in ("inputs", "labels", "domains", "writers"):
            values = getattr(self, name)
            if values is not None:
                yield name, values


@dataclass
class Decoded:
    """A whole data set as read from files, not yet trusted.

    Attributes:
        train: Training part.
        test: Test part.
        files: The file that each array came from, e.g. ``{"train.inputs": "train-images-idx3-ubyte.gz"}``, so that an
            error can name it.
        notes: More for the manifest.
        claims: Name of the edition that the reader takes it for, where a set has editions of several forms.
        published_md5: Files whose MD5 is published, to be checked where the edition has no checksums of its arrays.
    """

    train: Arrays
    test: Arrays
    files: dict[str, str] = field(default_factory=dict)
    notes: dict[str, object] = field(default_factory=dict)
    claims: str | None = None
    published_md5: dict[Path, str] = field(default_factory=dict)

    def named(self) -> Iterator[tuple[str, Array]]:
        """All arrays, as ``train.inputs``, ``train.labels`` and so on."""
        for part, arrays in (("train", self.train), ("test", self.test)):
            for name, values in arrays.named():
                yield f"{part}.{name}", values

    def file_of(self, array: str) -> str:
        """What to call the origin of an array in a message."""
        return self.files.get(array, array)

    def check_shapes(self, num_classes: int) -> None:
        """Refuse parts whose arrays do not fit each other, naming the file."""
        for part, arrays in (("train", self.train), ("test", self.test)):
            where = self.file_of(f"{part}.labels")
            if len(arrays.inputs) == 0:
                raise DataError(f"{self.file_of(f'{part}.inputs')}: holds no samples")
            for name, values in arrays.named():
                if len(values) != len(arrays.inputs):
                    raise DataError(
                        f"{self.file_of(f'{part}.{name}')}: {len(values):,} {name}, but "
                        f"{self.file_of(f'{part}.inputs')} has {len(arrays.inputs):,} samples"
                    )
            lowest, highest = int(arrays.labels.min()), int(arrays.labels.max())
            if lowest < 0 or highest >= num_classes:
                raise DataError(f"{where}: labels run from {lowest} to {highest}, but there are {num_classes} classes")


def digest(values: Array) -> str:
    """Checksum of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).hexdigest()


def digests(decoded: Decoded) -> dict[str, str]:
    """Checksum of every array."""
    return {name: digest(values) for name, values in decoded.named()}


def fingerprint(digests_by_name: dict[str, str], shapes: dict[str, list[int]]) -> str:
    """One checksum of the whole content: arrays, their names and their shapes."""
    text = ";".join(f"{name}{shapes[name]}{digests_by_name[name]}" for name in sorted(digests_by_name))
    return hashlib.sha256(text.encode()).hexdigest()
