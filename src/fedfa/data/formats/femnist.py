"""Federated EMNIST: samples grouped by writer, as LEAF's JSON or as TensorFlow Federated's HDF5."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedfa.data.formats.untrusted_files import content, reading
from fedfa.data.optional_imports import import_optional
from fedfa.data.raw import Array, RawSamples
from fedfa.errors import DataError

#: The samples, in which a writer's id is the position of the name, and the names.
SamplesByWriter = tuple[RawSamples, list[str]]


def read_leaf(paths: list[Path]) -> SamplesByWriter:
    """Read LEAF's JSON files: users, and for each a list of images (784 numbers, dark ink) and labels."""

    def writers() -> Iterator[tuple[str, Array, Array]]:
        for path in paths:
            with reading(path):
                loaded = json.loads(content(path))
                for name in loaded["users"]:
                    yield _writer(path, name, loaded["user_data"][name], "x", "y")

    return _joined(writers())


def read_tff(path: Path) -> SamplesByWriter:
    """Read TensorFlow Federated's HDF5: ``examples/WRITER/{pixels,label}``, dark ink."""
    h5py = import_optional("h5py", f"reading {path.name}")
    with reading(path), h5py.File(path, "r") as file:
        examples = file["examples"]
        return _joined(_writer(path, name, examples[name], "pixels", "label") for name in sorted(examples))


def _writer(path: Path, name: str, share: Mapping[str, Any], images: str, labels: str) -> tuple[str, Array, Array]:
    """A writer's samples; dark-on-light values in [0, 1] become light-on-dark bytes, as in MNIST."""
    values = np.asarray(share[images], dtype=np.float64)
    if values.size % 784:
        raise DataError(f"{path}: images are not of 28×28 values")
    ink: Array = np.rint((1 - np.clip(values.reshape(-1, 28, 28), 0, 1)) * 255).astype(np.uint8)
    return name, ink, np.asarray(share[labels], dtype=np.int64)


def _joined(writers: Iterator[tuple[str, Array, Array]]) -> SamplesByWriter:
    names: list[str] = []
    images, labels = [np.empty((0, 28, 28), np.uint8)], [np.empty(0, np.int64)]
    for name, ink, numbers in writers:
        names.append(name)
        images.append(ink)
        labels.append(numbers)
    owners = np.repeat(np.arange(len(names)), [len(share) for share in labels[1:]])
    return RawSamples(np.concatenate(images), np.concatenate(labels), writers=owners), names
