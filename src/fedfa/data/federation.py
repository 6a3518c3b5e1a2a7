"""A data set split over clients: the training loop's view of data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedfa.data.augmentation import AUGMENTATIONS, Augmentation, CropAndFlip
from fedfa.data.partitions.assignment import IntArray, Partition
from fedfa.data.partitions.rules import number_of_clients, partition
from fedfa.data.partitions.specs import AnyPartition, Natural, parse_partition, partition_text
from fedfa.data.preprocessing import Normalisation, Preprocessing
from fedfa.data.raw import whole_number
from fedfa.data.samples import DataOrigin, DataSet, Samples, select
from fedfa.data.standardisation import Standardise, fit
from fedfa.data.validation import ValidationSet
from fedfa.errors import DataError
from fedfa.trees import NetworkInput

_MOST_NUMBERS = 10**6
"""Beyond it, statistics of single clients are not stored with a model."""


class ClientSamples:
    """The samples of one client. Creating one is cheap: indices are a view, everything else is computed on demand."""

    __slots__ = ("__dict__", "_normalisation", "_num_classes", "_samples", "augmentation", "positions")

    def __init__(
        self,
        samples: Samples,
        positions: Tensor,
        num_classes: int,
        normalisation: Normalisation,
        augmentation: Augmentation | None = None,
    ) -> None:
        self._samples = samples
        self._num_classes = num_classes
        self._normalisation = normalisation
        #: Changes the batches of local training, and nothing else.
        self.augmentation = augmentation
        #: Positions of the client's samples among all training samples.
        self.positions = positions

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"<ClientSamples: {self.size:,} samples of {int((self.label_counts > 0).sum())} classes>"

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.positions)

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the client's samples, ``int64 [size]``."""
        return self._samples.labels[self.positions]

    @cached_property
    def label_counts(self) -> Tensor:
        """Number of samples of each class, ``int64 [classes]``."""
        return torch.bincount(self.labels, minlength=self._num_classes)

    def batch(self, positions: Tensor) -> tuple[NetworkInput, Tensor]:
        """Normalised inputs and labels at some positions of this client's samples."""
        return self.at(self.positions[positions])

    def at(self, positions: Tensor) -> tuple[NetworkInput, Tensor]:
        """Normalised inputs and labels at some positions of all training samples."""
        inputs = select(self._samples.inputs, positions)
        return self._normalisation.batch(inputs), self._samples.labels.index_select(0, positions)


@dataclass(frozen=True, kw_only=True)
class FederationOrigin(DataOrigin):
    """How a federation was made: the data set's origin and the arguments of :meth:`DataSet.split`."""

    partition: AnyPartition
    clients: int
    seed: int
    standardise: Standardise = "none"
    augment: str = "none"

    def rebuild(self, offline: bool = False) -> Federation:
        """Load the data again and split them as before."""
        from fedfa.data.loading import load  # heavy: imports every data set's definition

        directory = Path(self.data_dir) if self.data_dir else None
        dataset = load(self.name, data_dir=directory, offline=offline, columns=self.columns)
        federation = dataset.normalised(self.normalisation).split(self.partition, self.clients, self.seed)
        return federation.standardised(self.standardise).augmented(self.augment)


@dataclass(frozen=True)
class SplitSummary:
    """Key figures of a split; as text, one line.

    Attributes:
        samples: Number of training samples.
        assigned: Number of samples that a client holds.
        empty: Number of clients without samples.
        classes_held: Mean number of classes of a client with samples.
        label_skew: Mean total-variation distance between a client's label distribution and that of all samples,
            weighted by client size: 0 where they are equal, towards 1 where they have nothing in common.
    """

    clients: int
    samples: int
    assigned: int
    smallest: int
    median: float
    largest: int
    empty: int
    classes_held: float
    label_skew: float

    def __str__(self) -> str:
        empty = f"; {self.empty:,} are empty" if self.empty else ""
        return (
            f"{self.clients:,} clients hold {self.assigned:,} of {self.samples:,} samples; per client "
            f"{self.smallest:,} to {self.largest:,}, median {self.median:,.0f}{empty}. Classes per client: "
            f"{self.classes_held:.1f} on average. Label skew {self.label_skew:.2f} (0: all clients alike; "
            "1: nothing in common)."
        )


class Federation:
    """A data set and the split of its training samples over clients; made by :meth:`DataSet.split`.

    Attributes:
        dataset: The data set.
        partition: Positions of every client's samples.
        origin: How to rebuild it; None where the data or the partition were given in Python.
        names: Names of the clients, where the data name them; else empty.
        standardise: Whether inputs are standardised; see :meth:`standardised`.
        augmentation: Changes training batches; see :meth:`augmented`.
        validation: Samples for choosing, which no client trains on; None without ``data.validation``.

    Example:
        >>> from fedfa.data import load
        >>> federation = load("digits").split("shards:2", clients=10)
        >>> len(federation), federation[0].size, [client.size for client in federation][:3]
        (10, 144, [144, 144, 145])
    """

    def __init__(
        self,
        dataset: DataSet,
        partition: Partition,
        origin: FederationOrigin | None = None,
        validation: ValidationSet | None = None,
        *,
        names: tuple[str, ...] = (),
    ) -> None:
        self.dataset = dataset
        self.partition = partition
        self.origin = origin
        self.names = names
        self.standardise: Standardise = "none"
        self.augmentation: Augmentation | None = None
        self._fallback = dataset.normalisation  # of a client without statistics of its own
        self.validation = validation
        self._order = torch.from_numpy(partition.order)

    @classmethod
    def of(cls, dataset: DataSet, spec: str | AnyPartition, clients: int | None, seed: int) -> Federation:
        """See :meth:`DataSet.split`."""
        spec = parse_partition(spec) if isinstance(spec, str) else spec
        if not isinstance(spec, get_args(AnyPartition)):
            raise DataError(f"partition = {spec!r}: give text such as 'shards:2', or its specification")
        if clients is not None:
            whole_number(clients, "clients")
        whole_number(seed, "seed")
        split = partition(dataset.train, spec, number_of_clients(spec, clients), dataset.num_classes, seed)
        names: tuple[str, ...] = ()
        if isinstance(spec, Natural) and dataset.owners and dataset.train.writers is not None:
            held = torch.unique(dataset.train.writers).tolist()
            names = tuple(dataset.owners[number] for number in held) if len(held) == len(split) else ()
        loaded = dataset.origin
        if loaded is None:
            return cls(dataset, split, names=names)
        origin = FederationOrigin(**vars(loaded), partition=spec, clients=len(split), seed=seed)
        return cls(dataset, split, origin, names=names)

    def standardised(self, by: Standardise = "federation") -> Federation:
        """The same clients with inputs of mean 0 and standard deviation 1, fitted on training samples only.

        Tables are standardised column by column, other float inputs along their first axis (channels).

        Args:
            by: ``"federation"``: with the statistics of all clients' samples together. ``"client"``: every client with
                its own, also its test samples; test samples and predictions that name no client use those of all.
                ``"none"``: not at all.

        Raises:
            DataError: The inputs are images, which are normalised already, or integers.
        """
        if by not in get_args(Standardise):
            raise DataError(f"standardise = {by!r}: choose one of {', '.join(get_args(Standardise))}")
        if by == self.standardise or by == "none":
            if by != self.standardise:
                raise DataError("the federation is standardised; split the data set again for one that is not")
            return self
        if self.standardise != "none":
            raise DataError(f"the federation is standardised by {self.standardise} already")
        fitted = fit(self.dataset.train.inputs, np.sort(self.partition.order), self.dataset.normalisation)
        if by == "client" and len(self) * len(fitted.numbers()) > _MOST_NUMBERS:
            raise DataError(
                f"standardise = 'client' would store {len(self):,} clients × {len(fitted.numbers()):,} numbers with "
                "the model; use 'federation'"
            )
        changed = copy.copy(self)
        changed.dataset = replace(self.dataset, normalisation=fitted).with_origin(self.dataset.origin)
        changed.standardise = by
        changed._fallback = self.dataset.normalisation
        changed.origin = self.origin and replace(self.origin, standardise=by)
        return changed

    def augmented(self, augmentation: str | Augmentation) -> Federation:
        """The same clients with random changes of training batches; test samples stay as they are.

        Args:
            augmentation: ``"crop-flip"``: a random crop of the image padded by 4 pixels, and a random flip from left to
                right, as usual for CIFAR. ``"none"``: none. Or a function of a batch as the network reads it and a
                NumPy random generator, the client's own in the round, that returns the batch to train on.

        Raises:
            DataError: There is no such augmentation, or the inputs are no images.
        """
        changed = copy.copy(self)
        if callable(augmentation):
            changed.augmentation, changed.origin = augmentation, None  # a function cannot be recorded
            return changed
        if augmentation == "none":
            changed.augmentation = None
        elif augmentation == "crop-flip":
            train = self.dataset.train
            if not train.is_image:
                raise DataError(f"augment = 'crop-flip' is for images, not for {train.form}")
            blank = self.dataset.normalisation.batch(torch.zeros(1, *train.inputs.shape[1:]).to(train.inputs.dtype))
            changed.augmentation = CropAndFlip(blank)
        else:
            raise DataError(f"augment = {augmentation!r}: choose {' or '.join(AUGMENTATIONS)}, or give a function")
        changed.origin = self.origin and replace(self.origin, augment=augmentation)
        return changed

    def normalisation_of(self, client: int | None) -> Normalisation:
        """How inputs are prepared for a client's model, or for the global one."""
        if client is None or self.standardise != "client" or not self.partition.sizes[client]:
            return self.dataset.normalisation
        return fit(self.dataset.train.inputs, self.partition.client(client), self._fallback)

    def preprocessing(self) -> Preprocessing:
        """What a trained model needs in order to read raw inputs like these."""
        common = self.dataset.preprocessing()
        if self.standardise != "client":
            return common
        return replace(common, clients=tuple(self.normalisation_of(client) for client in range(len(self))))

    def __len__(self) -> int:
        return len(self.partition)

    def __getitem__(self, number: int) -> ClientSamples:
        return self.client(number)

    def __iter__(self) -> Iterator[ClientSamples]:
        return (self.client(number) for number in range(len(self)))

    def __repr__(self) -> str:
        made = f", {partition_text(self.origin.partition)}, seed {self.origin.seed}" if self.origin else ""
        return (
            f"<Federation {self.dataset.name}: {len(self):,} clients{made}; {len(self.partition.order):,} samples, "
            f"{self.sizes.min():,} to {self.sizes.max():,} per client>"
        )

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self)

    @property
    def sizes(self) -> IntArray:
        """Number of samples of each client."""
        return self.partition.sizes

    def summary(self) -> SplitSummary:
        """Key figures of the split; ``str`` of it is one line."""
        split, dataset = self.partition, self.dataset
        sizes = split.sizes
        labels = dataset.train.labels.numpy()
        # Only the (client, class) pairs that occur: a full table of a million clients would be mostly zeros.
        pairs, counts = np.unique(split.owners() * dataset.num_classes + labels[split.order], return_counts=True)
        owners, held = np.divmod(pairs, dataset.num_classes)
        overall = np.bincount(labels[split.order], minlength=dataset.num_classes) / max(len(split.order), 1)
        share = counts / sizes[owners]
        # The distance is Σ max(share − overall, 0) over classes; only classes that the client holds contribute.
        distance = np.bincount(owners, weights=np.maximum(share - overall[held], 0), minlength=len(split))
        return SplitSummary(
            clients=len(split),
            samples=len(dataset.train),
            assigned=len(split.order),
            smallest=int(sizes.min()),
            median=float(np.median(sizes)),
            largest=int(sizes.max()),
            empty=int((sizes == 0).sum()),
            classes_held=len(pairs) / max(int((sizes > 0).sum()), 1),
            label_skew=float((distance * sizes).sum() / max(sizes.sum(), 1)),
        )

    def pooled(self) -> Federation:
        """The same data with one client that holds the samples of all."""
        order = self.partition.order
        all_in_one = Partition(order, np.array([0, len(order)], dtype=self.partition.offsets.dtype))
        pooled = Federation(self.dataset, all_in_one, validation=self.validation)
        pooled.augmentation = self.augmentation
        pooled.standardise = "federation" if self.standardise != "none" else "none"
        return pooled

    def with_validation(self, validation: ValidationSet, partition: Partition | None = None) -> Federation:
        """The same clients with validation samples, and without those in another partition."""
        changed = copy.copy(self)
        changed.validation = validation
        if partition is not None:
            changed.partition, changed._order = partition, torch.from_numpy(partition.order)
            if self.standardise != "none":  # fitted again, without the samples that no client trains on any more
                fitted = fit(self.dataset.train.inputs, np.sort(partition.order), self._fallback)
                changed.dataset = replace(self.dataset, normalisation=fitted).with_origin(self.dataset.origin)
        return changed

    def owners_of(self, on: Literal["test", "validation"]) -> Tensor | None:
        """The client of each test or validation sample, -1 for none; None where samples do not name their clients."""
        if on == "validation":
            return self.validation.owners if self.validation is not None else None
        writers = self.dataset.test.writers
        if not self.names or writers is None:
            return None
        numbers = {self.dataset.owners.index(name): client for client, name in enumerate(self.names)}
        return torch.tensor([numbers.get(writer, -1) for writer in writers.tolist()])

    def test_of(self, number: int) -> Samples:
        """The client's own test samples, where they are known; else those of its domains, else all."""
        test = self.dataset.test
        if self.names and test.writers is not None:
            own = (test.writers == self.dataset.owners.index(self.names[number])).nonzero().squeeze(1)
            if len(own):
                return test.subset(own)
        return self._in_domains_of(number, test)

    def validation_of(self, number: int) -> Samples:
        """The validation samples that the client held out; or else those of its domains."""
        assert self.validation is not None
        own = self.validation.of(number)
        return self._in_domains_of(number, self.validation.samples) if own is None else own

    def _in_domains_of(self, number: int, test: Samples) -> Samples:
        train = self.dataset.train
        if train.domains is None or test.domains is None or len(self.dataset.domains) < 2:
            return test
        held = torch.unique(train.domains[self.client(number).positions])
        chosen = torch.isin(test.domains, held).nonzero().squeeze(1)
        return test.subset(chosen)

    def client(self, number: int) -> ClientSamples:
        """The samples of client ``number``, counted from 0."""
        self.partition.client(number)  # refuses numbers that are out of range
        first, last = (int(end) for end in self.partition.offsets[number : number + 2])
        return ClientSamples(
            self.dataset.train,
            self._order[first:last],
            self.dataset.num_classes,
            self.normalisation_of(number),
            self.augmentation,
        )
