"""Federated EMNIST: samples grouped by writer, as LEAF's JSON or as TensorFlow Federated's HDF5."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedfa.data.decoded import Array, Arrays
from fedfa.data.formats.files import content, naming
from fedfa.data.optional import needs
from fedfa.errors import DataError


def read_leaf(paths: list[Path]) -> tuple[Arrays, list[str]]:
    """Read LEAF's JSON files: users, and for each a list of images (784 numbers, ink is dark) and labels.

    Returns:
        The samples, in which a writer's id is the position of the name, and the names.
    """
    names: list[str] = []
    images: list[Array] = []
    labels: list[Array] = []
    for path in paths:
        with naming(path):
            loaded = json.loads(content(path))
            for user in loaded["users"]:
                share = loaded["user_data"][user]
                names.append(user)
                images.append(_ink(np.asarray(share["x"], dtype=np.float64), path))
                labels.append(np.asarray(share["y"], dtype=np.int64))
    return _gathered(images, labels), names


def read_tff(path: Path) -> tuple[Arrays, list[str]]:
    """Read TensorFlow Federated's HDF5: ``examples/WRITER/{pixels,label}``, ink is dark."""
    h5py = needs("h5py", f"reading {path.name}")
    images, labels, names = [], [], []
    with naming(path), h5py.File(path, "r") as file:
        for name in sorted(file["examples"]):
            share = file["examples"][name]
            names.append(name)
            images.append(_ink(np.asarray(share["pixels"], dtype=np.float64), path))
            labels.append(np.asarray(share["label"], dtype=np.int64))
    return _gathered(images, labels), names


def _ink(values: Array, path: Path) -> Array:
    """Dark-on-light values in [0, 1] to light-on-dark bytes, as in MNIST."""
    if values.size % 784:
        raise DataError(f"{path}: images are not of 28×28 values")
    ink: Array = np.rint((1 - np.clip(values.reshape(-1, 28, 28), 0, 1)) * 255).astype(np.uint8)
    return ink


def _gathered(images: list[Array], labels: list[Array]) -> Arrays:
    sizes = [len(share) for share in labels]
    return Arrays(
        np.concatenate(images) if images else np.empty((0, 28, 28), np.uint8),
        np.concatenate(labels) if labels else np.empty(0, np.int64),
        writers=np.repeat(np.arange(len(sizes)), sizes),
    )
