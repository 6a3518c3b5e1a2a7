"""Samples as NumPy arrays, between the reading of a source and the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedfa.errors import DataError

Array = npt.NDArray[Any]


def to_numpy(values: Any) -> Array:
    """A tensor or anything that NumPy understands as an array."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def whole_number(value: Any, what: str) -> int:
    """A number that is not negative.

    Raises:
        DataError: It is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise DataError(f"{what} = {value!r}: give a whole number, 0 or more")
    return int(value)


@dataclass
class RawSamples:
    """Inputs as in :class:`~fedfa.data.Samples`, labels and, where known, domains and writers."""

    inputs: Array
    labels: Array
    domains: Array | None = None
    writers: Array | None = None

    def __post_init__(self) -> None:
        if self.inputs.dtype in (np.uint8, np.uint16) and self.inputs.ndim == 3:
            self.inputs = self.inputs[..., None]  # add the channel axis of grey images
        self.inputs = np.ascontiguousarray(self.inputs)
        for name in ("labels", "domains", "writers"):
            if getattr(self, name) is not None:
                setattr(self, name, np.ascontiguousarray(getattr(self, name), dtype=np.int64))

    def named(self) -> Iterator[tuple[str, Array]]:
        """The arrays that are set, with their names."""
        for name in ("inputs", "labels", "domains", "writers"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    def select(self, chosen: Array) -> RawSamples:
        """The samples at some positions, or where a mask is true."""
        return RawSamples(**{name: values[chosen] for name, values in self.named()})

    def counts(self, num_classes: int, num_domains: int) -> dict[str, object]:
        """Numbers of samples, in all and by class and domain, for the manifest."""
        result: dict[str, object] = {
            "samples": len(self.inputs),
            "per_class": np.bincount(self.labels, minlength=num_classes).tolist(),
        }
        if self.domains is not None:
            result["per_domain"] = np.bincount(self.domains, minlength=num_domains).tolist()
        if self.writers is not None:
            result["writers"] = len(np.unique(self.writers))
        return result


@dataclass
class RawDataSet:
    """A whole data set as read from files, not verified yet."""

    train: RawSamples
    test: RawSamples
    validation: RawSamples | None = field(default=None, kw_only=True)
    files: dict[str, str] = field(default_factory=dict)
    """The file that an array came from, for error messages: ``{"train.inputs": "train-images.gz"}``, or ``{"train":
    "train.mat"}`` where one file holds all arrays."""
    notes: dict[str, object] = field(default_factory=dict)
    """Further entries of the manifest."""
    claims: str | None = None
    """Name of the edition that the reader recognised, where the editions of a set differ in their format."""
    published_md5: dict[Path, str] = field(default_factory=dict)
    """Files with a published MD5, checked where the edition has no checksums of its arrays."""

    def named(self) -> Iterator[tuple[str, Array]]:
        """All arrays, as ``train.inputs``, ``train.labels`` and so on."""
        for part, samples in self.parts():
            for name, values in samples.named():
                yield f"{part}.{name}", values

    def parts(self) -> Iterator[tuple[str, RawSamples]]:
        """The parts that are there, with their names."""
        yield from (("train", self.train), ("test", self.test))
        if self.validation is not None:
            yield "validation", self.validation

    def file_of(self, array: str) -> str:
        """The file that an array came from, else the array's name."""
        return self.files.get(array) or self.files.get(array.partition(".")[0], array)

    def check_shapes(self, num_classes: int) -> None:
        """Refuse arrays that do not fit each other, naming the file."""
        for part, samples in self.parts():
            inputs = self.file_of(f"{part}.inputs")
            if len(samples.inputs) == 0:
                raise DataError(f"{inputs}: holds no samples")
            for name, values in samples.named():
                if len(values) != len(samples.inputs):
                    raise DataError(
                        f"{self.file_of(f'{part}.{name}')}: {len(values):,} {name}, but {inputs} has "
                        f"{len(samples.inputs):,} samples"
                    )
            lowest, highest = int(samples.labels.min()), int(samples.labels.max())
            if lowest < 0 or highest >= num_classes:
                raise DataError(
                    f"{self.file_of(f'{part}.labels')}: labels run from {lowest} to {highest}, but there are "
                    f"{num_classes} classes"
                )

    def digests(self) -> dict[str, str]:
        """Checksum of every array."""
        return {name: digest(values) for name, values in self.named()}

    def fingerprint(self, digests: Mapping[str, str]) -> str:
        """One checksum of the whole content: arrays (by their digests), their names and their shapes."""
        shapes = {name: list(values.shape) for name, values in self.named()}
        text = ";".join(f"{name}{shapes[name]}{digests[name]}" for name in sorted(digests))
        return hashlib.sha256(text.encode()).hexdigest()


def digest(values: Array) -> str:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).hexdigest()
