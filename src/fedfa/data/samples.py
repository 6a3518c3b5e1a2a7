"""The two containers that everything else passes around: samples, and a data set of a training and a test part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedfa.data.normalise import Normalisation, named_normalisation
from fedfa.errors import DataError


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs with their labels, and where known the domain and the writer of each.

    Attributes:
        inputs: Images as ``uint8 [N, H, W, C]``; anything else as ``float32 [N, …]``.
        labels: ``int64 [N]``.
        domains: ``int64 [N]``, positions in :attr:`DataSet.domains`, or None.
        writers: ``int64 [N]``, ids of the writer or any other natural owner of a sample, or None.
    """

    inputs: Tensor
    labels: Tensor
    domains: Tensor | None = None
    writers: Tensor | None = None

    def __post_init__(self) -> None:
        if self.inputs.dtype not in (torch.uint8, torch.float32):
            raise DataError(f"inputs must be uint8 images or float32, not {self.inputs.dtype}")
        if self.inputs.dtype == torch.uint8 and self.inputs.dim() != 4:
            raise DataError(f"uint8 inputs are images of shape [N, H, W, C], not {list(self.inputs.shape)}")
        for name in ("labels", "domains", "writers"):
            values: Tensor | None = getattr(self, name)
            if values is None:
                continue
            if values.dtype != torch.int64 or values.shape != (len(self.inputs),):
                raise DataError(
                    f"{name} must be int64 of shape [{len(self.inputs)}], "
                    f"not {values.dtype} of shape {list(values.shape)}"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def is_image(self) -> bool:
        """Whether the inputs are stored as pixels."""
        return self.inputs.dtype == torch.uint8

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as a network reads it: ``(C, H, W)`` for images."""
        if self.is_image:
            _, height, width, channels = self.inputs.shape
            return (channels, height, width)
        return tuple(self.inputs.shape[1:])

    def subset(self, positions: Tensor) -> Samples:
        """The samples at some positions, copied."""
        return Samples(
            self.inputs[positions],
            self.labels[positions],
            None if self.domains is None else self.domains[positions],
            None if self.writers is None else self.writers[positions],
        )


@dataclass(frozen=True, eq=False)
class DataSet:
    """A named data set: training and test samples, and all that a run's record must say about them.

    Attributes:
        name: Name it was loaded by.
        train: Training samples, the ones that are split over clients.
        test: Test samples.
        classes: Names of the classes; label ``i`` is ``classes[i]``.
        domains: Names of the domains, empty when there is only one.
        normalisation: Constants that batches are normalised with.
        fingerprint: Checksum of the content, equal for equal samples in equal order.
        manifest: Source, edition, counts, class balance, terms: whatever a reader of a result may ask.
    """

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    normalisation: Normalisation
    fingerprint: str
    manifest: Mapping[str, object]

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as a network reads it: ``(C, H, W)`` for images."""
        return self.train.input_shape

    def normalised(self, how: str) -> DataSet:
        """The same data with a named alternative normalisation, e.g. ``"authors"``."""
        return replace(self, normalisation=named_normalisation(how, self.name, self.normalisation))
