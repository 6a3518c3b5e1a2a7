"""Samples, and data sets of training and test samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfa.arguments import checks_arguments
from fedfa.data.preprocessing import NORMALISATIONS, PEAKS, InputKind, Normalisation, Preprocessing
from fedfa.errors import DataError

if TYPE_CHECKING:
    from fedfa.data.federation import Federation
    from fedfa.data.partitions.specs import AnyPartition


_KINDS: Mapping[torch.dtype, InputKind] = {
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.float32: "float32",
    torch.int64: "int64",
    torch.int8: "record",
}


def select(inputs: Tensor, positions: Tensor) -> Tensor:
    """The inputs at some positions."""
    if inputs.dtype == torch.uint16:  # torch selects no 16-bit numbers without a sign
        return inputs.view(torch.int16).index_select(0, positions).view(torch.uint16)
    return inputs.index_select(0, positions)


@dataclass(frozen=True, eq=False, repr=False)
class Samples:
    """Inputs with their labels and, where known, the domain and the writer of each.

    Attributes:
        inputs: Images as ``uint8`` or ``uint16 [N, H, W, C]``; integers such as tokens as ``int64 [N, …]``; inputs of
            several tensors as ``int8 [N, bytes]`` (:mod:`fedfa.data.records`); anything else as ``float32 [N, …]``.
        labels: ``int64 [N]``.
        domains: ``int64 [N]``, positions in :attr:`DataSet.domains`, or None.
        writers: ``int64 [N]``, ids of the writer or any other natural owner of a sample, or None. Where the data set
            names its owners, they are positions in :attr:`DataSet.owners`.
    """

    inputs: Tensor
    labels: Tensor
    domains: Tensor | None = None
    writers: Tensor | None = None

    def __post_init__(self) -> None:
        if self.inputs.dtype not in (*PEAKS, torch.float32, torch.int64, torch.int8):
            raise DataError(
                f"inputs must be uint8 or uint16 images, int64 integers or float32 numbers, not {self.inputs.dtype}"
            )
        if self.is_image and self.inputs.dim() != 4:
            kind = str(self.inputs.dtype).removeprefix("torch.")
            raise DataError(f"{kind} inputs are images of shape [N, H, W, C], not {list(self.inputs.shape)}")
        if self.inputs.dtype == torch.int8 and self.inputs.dim() != 2:
            raise DataError(f"int8 inputs are packed tensors of shape [N, bytes], not {list(self.inputs.shape)}")
        for name in ("labels", "domains", "writers"):
            values: Tensor | None = getattr(self, name)
            if values is not None and (values.dtype != torch.int64 or values.shape != (len(self.inputs),)):
                raise DataError(
                    f"{name} must be int64 of shape [{len(self.inputs)}], "
                    f"not {values.dtype} of shape {list(values.shape)}"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        known = "".join(f", with {name}" for name in ("domains", "writers") if getattr(self, name) is not None)
        return f"<Samples: {len(self):,} {self.form}{known}>"

    @property
    def form(self) -> str:
        """Description of the inputs: ``images of 28×28×1`` or ``inputs of shape (60,)``."""
        shape = tuple(self.inputs.shape[1:])
        if self.inputs.dtype == torch.int8:
            return "inputs of several tensors"
        if self.inputs.dtype == torch.int64:
            return f"integer inputs of shape {shape}"
        return f"images of {'×'.join(map(str, shape))}" if self.is_image else f"inputs of shape {shape}"

    @property
    def is_image(self) -> bool:
        """Whether the inputs are stored as pixels."""
        return self.inputs.dtype in PEAKS

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as a network reads it: ``(C, H, W)`` for images."""
        if self.is_image:
            _, height, width, channels = self.inputs.shape
            return (channels, height, width)
        return tuple(self.inputs.shape[1:])

    def subset(self, positions: Tensor) -> Samples:
        """A copy of the samples at some positions."""
        return Samples(**{name: select(values, positions) for name, values in vars(self).items() if values is not None})


@dataclass(frozen=True)
class Columns:
    """Which columns of the user's own table or data set are what; None where that is found by itself.

    Attributes:
        label: Column of the labels.
        inputs: Columns of the inputs; left out, all others.
        clients: Column that names the client of each sample.
        domains: Column that names the domain of each sample.
    """

    label: str | None = None
    inputs: tuple[str, ...] | None = None
    clients: str | None = None
    domains: str | None = None

    def given(self) -> dict[str, Any]:
        """The columns that are named."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class DataOrigin:
    """How a data set was loaded, so that it can be loaded again.

    Attributes:
        name: Name of the data set, or the absolute path of the user's own.
        normalisation: Name of the normalisation, a key of :data:`fedfa.data.NORMALISATIONS`.
        data_dir: Data directory that was given to :func:`fedfa.data.load`, or None.
        columns: Which columns of a table are what.
    """

    name: str
    normalisation: str = "dataset"
    data_dir: str | None = None
    columns: Columns = Columns()


@dataclass(frozen=True, eq=False, repr=False)
class DataSet:
    """A named data set: training and test samples, and what the record of a run states about them.

    Attributes:
        name: Name of the data set; of a path, its stem.
        train: Training samples, which are split over clients.
        test: Test samples.
        classes: Names of the classes; label ``i`` is ``classes[i]``.
        domains: Names of the domains, empty when there is only one.
        normalisation: Constants that batches are normalised with.
        fingerprint: Checksum of the content, equal for equal samples in equal order.
        manifest: Source, edition, counts, class balance, terms of use.
        owners: Names of the clients or writers of one's own data; empty where they are numbers.
        validation: Samples that the source sets aside for validation, or None.
        origin: How to load it again; None for data that were given in Python.
    """

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    normalisation: Normalisation
    fingerprint: str
    manifest: Mapping[str, object]
    owners: tuple[str, ...] = ()
    validation: Samples | None = None
    # Not an argument of __init__, so that a copy changed with dataclasses.replace does not claim to be the original.
    origin: DataOrigin | None = field(default=None, init=False)

    def __repr__(self) -> str:
        samples = f"{len(self.train):,} training + {len(self.test):,} test {self.train.form}"
        domains = f", {len(self.domains)} domains" if self.domains else ""
        return f"<DataSet {self.name}: {samples}, {self.num_classes} classes{domains}>"

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as a network reads it: ``(C, H, W)`` for images."""
        return self.train.input_shape

    @property
    def reloadable(self) -> bool:
        """Whether :func:`fedfa.data.load` can open it again; not so for arrays that were given in Python."""
        return self.origin is not None

    def with_origin(self, origin: DataOrigin | None) -> DataSet:
        """A copy that records how it was loaded."""
        copy = replace(self)
        object.__setattr__(copy, "origin", origin)
        return copy

    def normalised(self, name: str) -> DataSet:
        """The same data with a named normalisation: ``"dataset"`` or ``"authors"``."""
        if name not in NORMALISATIONS:
            raise DataError(f"unknown normalisation {name!r}; choose one of {', '.join(NORMALISATIONS)}")
        stored = self.manifest.get("normalisation")
        statistics = Normalisation.from_dict(stored) if isinstance(stored, Mapping) else self.normalisation
        changed = replace(self, normalisation=NORMALISATIONS[name].get(self.name, statistics))
        return changed.with_origin(self.origin and replace(self.origin, normalisation=name))

    def preprocessing(self) -> Preprocessing:
        """What a trained model needs in order to read raw inputs like these."""
        return Preprocessing(self.normalisation, self.input_shape, _KINDS[self.train.inputs.dtype], self.classes)

    @checks_arguments("split", {"alpha": "give it with the partition: split('dirichlet:0.1')"})
    def split(self, partition: str | AnyPartition, clients: int | None = None, seed: int = 1) -> Federation:
        """Split the training samples over clients.

        Args:
            partition: A partition such as ``"shards:2"``, or its specification.
            clients: Number of clients; left out: 100, or as many as the data have with ``"natural"``.
            seed: Seed of the split. It is independent of the seed of the training.

        Example:
            >>> from fedfa.data import load
            >>> load("digits").split("shards:2", clients=10)
            <Federation digits: 10 clients, shards:2, seed 1; 1,442 samples, 144 to 145 per client>
        """
        from fedfa.data.federation import Federation  # imports this module

        return Federation.of(self, partition, clients, seed)
