"""The user's own data: arrays, an ``.npz`` file, a folder of class folders, or any torch ``Dataset``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfa.data import cache
from fedfa.data.formats.arrays import read_npz
from fedfa.data.formats.pictures import read_class_folders
from fedfa.data.raw import Array, RawDataSet, RawSamples, to_numpy
from fedfa.data.samples import DataSet, Samples
from fedfa.errors import DataError
from fedfa.learning.random import stream


def dataset_from(
    train: Any,
    test: Any = None,
    *,
    name: str = "own",
    classes: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> DataSet:
    """Make a data set from your own samples.

    Args:
        train: Path of an ``.npz`` file or of a folder of class folders; or a pair of arrays ``(inputs, labels)``; or a
            torch ``Dataset`` of ``(input, label)`` pairs. Images may be ``uint8 [N, H, W]``, ``[N, H, W, C]`` or
            ``[N, C, H, W]``, or PIL images; any other numbers become ``float32`` and are not normalised.
        test: The same for the test samples. Where it is None and the source has no test samples, a random
            ``test_fraction`` of every class is held out.
        name: Name for records and plots.
        classes: Names of the classes; default: those of the source, else the numbers.
        test_fraction: Share of samples to hold out.
        seed: Seed of that choice.

    Example:
        >>> x, y = np.random.default_rng(1).normal(size=(100, 4)), np.arange(100) % 2
        >>> dataset_from((x, y))
        <DataSet own: 80 training + 20 test inputs of shape (4,), 2 classes>
    """
    given, given_test, names = _read(train)
    _check_lengths(given)
    if test is not None:
        given_test, _, test_names = _read(test)
        _check_lengths(given_test)
        if names != test_names:
            raise DataError(
                f"training and test samples have different classes: {_short(names)} and {_short(test_names)}"
            )
    if given_test is None:
        given, given_test = _hold_out(given, test_fraction, seed)
    if given.inputs.shape[1:] != given_test.inputs.shape[1:]:
        raise DataError(
            f"training inputs are {list(given.inputs.shape[1:])}, but test inputs {list(given_test.inputs.shape[1:])}"
        )
    if given.inputs.dtype != given_test.inputs.dtype:
        raise DataError(
            f"training inputs are {given.inputs.dtype}, but test inputs {given_test.inputs.dtype}; uint8 inputs are "
            "images [N, H, W, C] and are normalised, other inputs are not: pass both in one type"
        )
    names = names if classes is None else tuple(classes)
    if names is None:
        names = tuple(str(number) for number in range(int(max(given.labels.max(), given_test.labels.max())) + 1))
    raw = RawDataSet(given, given_test)
    raw.check_shapes(len(names))
    normalisation = cache.statistics(given.inputs)
    return DataSet(
        name=name,
        train=_samples(given),
        test=_samples(given_test),
        classes=names,
        domains=(),
        normalisation=normalisation,
        fingerprint=raw.fingerprint(raw.digests()),
        manifest={
            "name": name,
            "source": "the user's own data",
            "classes": list(names),
            "normalisation": normalisation.to_dict(),
            "train": given.counts(len(names), 0),
            "test": given_test.counts(len(names), 0),
        },
    )


def from_path(source: Path, directory: Path, *, again: bool = False) -> DataSet:
    """Open the user's own file or folder through the cache; it is converted once, and ``again`` when it changes."""
    signature = _signature(source)
    key = f"own-{source.stem}-{hashlib.sha256(str(source).encode()).hexdigest()[:12]}"
    with cache.locked_for(directory, key):
        if not again and cache.is_cached(directory, key):
            stored = cache.open_cached(directory, key)
            if stored.manifest.get("signature") == signature:
                return replace(stored, name=source.stem)
        made = dataset_from(source, name=source.stem)
        raw = RawDataSet(_raw(made.train), _raw(made.test))
        manifest = {**made.manifest, "title": source.stem, "terms": "the user's own", "signature": signature}
        cache.write(raw, key, directory, manifest, replace=True)
    return replace(cache.open_cached(directory, key), name=source.stem)


def _read(source: Any) -> tuple[RawSamples, RawSamples | None, tuple[str, ...] | None]:
    """Training samples, test samples and names of the classes, the latter two where the source has them."""
    if isinstance(source, str | PathLike):
        path = Path(source).expanduser()
        if path.is_dir():
            return read_class_folders(path)
        if path.suffix == ".npz":
            return _from_npz(path)
        raise DataError(f"{path}: give an .npz file or a folder of class folders")
    if isinstance(source, tuple | list) and len(source) == 2:
        inputs, (labels, names) = _inputs(to_numpy(source[0])), _labels(to_numpy(source[1]))
        return RawSamples(inputs, labels), None, names
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return _from_torch(source)
    kind = type(source).__name__
    raise DataError(f"cannot make a data set of {kind}: give a path, (inputs, labels) or a torch Dataset")


def _from_npz(path: Path) -> tuple[RawSamples, RawSamples | None, tuple[str, ...] | None]:
    """``x_train, y_train, x_test, y_test`` or ``x, y``; optionally ``writers_*`` and ``classes``."""
    loaded = read_npz(path)
    parts = ("_train", "_test") if "x_train" in loaded else ("",)
    missing = [f"{letter}{part}" for part in parts for letter in "xy" if f"{letter}{part}" not in loaded]
    if missing:
        raise DataError(
            f"{path}: lacks the array {', '.join(missing)}; give x and y, or x_train, y_train, x_test and y_test"
        )
    labels, names = _labels(np.concatenate([loaded[f"y{part}"] for part in parts]))
    of_part = np.split(labels, np.cumsum([len(loaded[f"y{part}"]) for part in parts])[:-1])
    made = []
    for part, part_labels in zip(parts, of_part, strict=True):
        made.append(RawSamples(_inputs(loaded[f"x{part}"]), part_labels, writers=loaded.get(f"writers{part}")))
        _check_lengths(made[-1], f"{path}, x{part}: ")
    if "classes" in loaded:
        names = tuple(str(name) for name in loaded["classes"])
    return made[0], made[1] if len(made) == 2 else None, names


def _from_torch(source: Any) -> tuple[RawSamples, None, tuple[str, ...] | None]:
    pairs = [source[position] for position in range(len(source))]
    if not pairs:
        raise DataError("the torch Dataset is empty")
    inputs = [to_numpy(pair[0]) for pair in pairs]
    shapes = {value.shape for value in inputs}
    if len(shapes) > 1:
        raise DataError(f"the inputs have different shapes, e.g. {sorted(map(list, shapes))[:2]}; give them one size")
    names = getattr(source, "classes", None)
    samples = RawSamples(_inputs(np.stack(inputs)), np.array([int(pair[1]) for pair in pairs]))
    return samples, None, None if names is None else tuple(map(str, names))


def _inputs(values: Array) -> Array:
    """Images as ``uint8 [N, H, W, C]``, everything else as ``float32``."""
    if values.dtype.kind not in "fiub":
        raise DataError(f"inputs must be numbers, not {values.dtype}")
    if values.dtype != np.uint8 or values.ndim not in (3, 4):
        return values.astype(np.float32)
    if values.ndim == 4 and values.shape[1] in (1, 3) and values.shape[3] not in (1, 3):
        return values.transpose(0, 2, 3, 1)
    return values


def _labels(values: Array) -> tuple[Array, tuple[str, ...] | None]:
    if values.ndim != 1:
        raise DataError(f"labels must be one number or name per sample, not of shape {list(values.shape)}")
    if values.dtype.kind in "US":
        names, numbers = np.unique(values, return_inverse=True)
        return numbers, tuple(str(name) for name in names)
    if values.dtype.kind not in "iub":
        raise DataError(f"labels must be whole numbers or names, not {values.dtype}")
    return values.astype(np.int64), None


def _hold_out(given: RawSamples, fraction: float, seed: int) -> tuple[RawSamples, RawSamples]:
    """Hold out a random share of every class, at least one sample of each class that has two or more."""
    if not 0 < fraction < 1:
        raise DataError(f"test_fraction must lie between 0 and 1, not {fraction}")
    rng = stream(seed, "test-split")
    is_test = np.zeros(len(given.labels), dtype=bool)
    for label in np.unique(given.labels):
        members = rng.permutation(np.flatnonzero(given.labels == label))
        share = max(1, round(fraction * len(members))) if len(members) > 1 else 0
        is_test[members[:share]] = True
    return given.select(~is_test), given.select(is_test)


def _check_lengths(given: RawSamples, where: str = "") -> None:
    for array, values in given.named():
        if len(values) != len(given.inputs):
            raise DataError(f"{where}there are {len(given.inputs):,} inputs, but {len(values):,} {array}")


def _samples(raw: RawSamples) -> Samples:
    return Samples(**{name: torch.from_numpy(values) for name, values in raw.named()})


def _raw(samples: Samples) -> RawSamples:
    writers = None if samples.writers is None else samples.writers.numpy()
    return RawSamples(samples.inputs.numpy(), samples.labels.numpy(), writers=writers)


def _signature(source: Path) -> str:
    """A checksum that changes with any file of the source."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    text = hashlib.sha256()
    for path in files:
        about = path.stat()
        text.update(f"{path.relative_to(source.parent)}|{about.st_size}|{about.st_mtime_ns};".encode())
    return text.hexdigest()


def _short(names: tuple[str, ...] | None) -> str:
    return "unnamed" if names is None else ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
