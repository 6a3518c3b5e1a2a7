"""A data set split over clients: the training loop's view of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedfa.data.partitions.assignment import IntArray, Partition
from fedfa.data.partitions.rules import number_of_clients, partition
from fedfa.data.partitions.specs import AnyPartition, parse_partition, partition_text
from fedfa.data.preprocessing import Normalisation
from fedfa.data.samples import DataOrigin, DataSet, Samples
from fedfa.data.validation import ValidationSet


class ClientSamples:
    """The samples of one client. Creating one is cheap: indices are a view, everything else is computed on demand."""

    __slots__ = ("__dict__", "_normalisation", "_num_classes", "_samples", "positions")

    def __init__(self, samples: Samples, positions: Tensor, num_classes: int, normalisation: Normalisation) -> None:
        self._samples = samples
        self._num_classes = num_classes
        self._normalisation = normalisation
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

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised inputs and labels at some positions of this client's samples."""
        return self.at(self.positions[positions])

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised inputs and labels at some positions of all training samples."""
        inputs = self._samples.inputs.index_select(0, positions)
        return self._normalisation.batch(inputs), self._samples.labels.index_select(0, positions)


@dataclass(frozen=True, kw_only=True)
class FederationOrigin(DataOrigin):
    """How a federation was made: the data set's origin and the arguments of :meth:`DataSet.split`."""

    partition: AnyPartition
    clients: int
    seed: int

    def rebuild(self, offline: bool = False) -> Federation:
        """Load the data again and split them as before."""
        from fedfa.data.loading import load  # heavy: imports every data set's definition

        dataset = load(self.name, data_dir=Path(self.data_dir) if self.data_dir else None, offline=offline)
        return dataset.normalised(self.normalisation).split(self.partition, self.clients, self.seed)


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
    ) -> None:
        self.dataset = dataset
        self.partition = partition
        self.origin = origin
        self.validation = validation
        self._order = torch.from_numpy(partition.order)

    @classmethod
    def of(cls, dataset: DataSet, spec: str | AnyPartition, clients: int | None, seed: int) -> Federation:
        """See :meth:`DataSet.split`."""
        spec = parse_partition(spec) if isinstance(spec, str) else spec
        split = partition(dataset.train, spec, number_of_clients(spec, clients), dataset.num_classes, seed)
        loaded = dataset.origin
        if loaded is None:
            return cls(dataset, split)
        return cls(dataset, split, FederationOrigin(**vars(loaded), partition=spec, clients=len(split), seed=seed))

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
        return Federation(self.dataset, all_in_one, validation=self.validation)

    def with_validation(self, validation: ValidationSet, partition: Partition | None = None) -> Federation:
        """The same clients with validation samples, and without those in another partition."""
        return Federation(self.dataset, partition or self.partition, self.origin, validation)

    def test_of(self, number: int) -> Samples:
        """The test samples of the client's domains; all of them where there is one domain."""
        return self._in_domains_of(number, self.dataset.test)

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
        return Samples(test.inputs[chosen], test.labels[chosen], domains=test.domains[chosen])

    def client(self, number: int) -> ClientSamples:
        """The samples of client ``number``, counted from 0."""
        self.partition.client(number)  # refuses numbers that are out of range
        first, last = (int(end) for end in self.partition.offsets[number : number + 2])
        return ClientSamples(
            self.dataset.train, self._order[first:last], self.dataset.num_classes, self.dataset.normalisation
        )
