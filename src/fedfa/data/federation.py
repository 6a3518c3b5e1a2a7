"""A data set split over clients: what the training loop sees of data."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedfa.data.normalise import Normalisation
from fedfa.data.partitions import AnyPartition, Partition, partition
from fedfa.data.samples import DataSet, Samples


class ClientSamples:
    """One client's share. Making one costs nothing: indices are a view, the rest is computed when asked for."""

    __slots__ = ("__dict__", "_normalisation", "_num_classes", "_samples", "positions")

    def __init__(self, samples: Samples, positions: Tensor, num_classes: int, normalisation: Normalisation) -> None:
        self._samples = samples
        self._num_classes = num_classes
        self._normalisation = normalisation
        #: Positions of the client's samples among all training samples.
        self.positions = positions

    @property
    def size(self) -> int:
        """How many samples the client holds."""
        return len(self.positions)

    def __len__(self) -> int:
        return self.size

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the client's samples, ``int64 [size]``."""
        return self._samples.labels[self.positions]

    @cached_property
    def label_counts(self) -> Tensor:
        """How many samples of each class the client holds, ``int64 [classes]``."""
        return torch.bincount(self.labels, minlength=self._num_classes)

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised inputs and labels at some positions of this client's own samples."""
        return self.at(self.positions[positions])

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised inputs and labels at some positions of all training samples."""
        inputs = self._samples.inputs.index_select(0, positions)
        return self._normalisation.batch(inputs), self._samples.labels.index_select(0, positions)


class Federation:
    """A data set and the split of its training samples over clients.

    Example:
        >>> from fedfa.data import load, parse_partition
        >>> federation = Federation.split(load("digits"), parse_partition("shards:2"), clients=10, seed=1)
        >>> len(federation), federation.client(0).size
        (10, 144)
    """

    def __init__(self, dataset: DataSet, partition: Partition) -> None:
        self.dataset = dataset
        self.partition = partition
        self._order = torch.from_numpy(partition.order)

    @classmethod
    def split(cls, dataset: DataSet, spec: AnyPartition, clients: int | None, seed: int) -> Federation:
        """Split a data set; the arguments are those of :func:`fedfa.data.partition`."""
        return cls(dataset, partition(dataset.train, spec, clients, dataset.num_classes, seed))

    def __len__(self) -> int:
        return len(self.partition)

    def pooled(self) -> Federation:
        """The same data with one client that holds the samples of all."""
        order = self.partition.order
        return Federation(self.dataset, Partition(order, np.array([0, len(order)], dtype=self.partition.offsets.dtype)))

    def test_of(self, number: int) -> Samples:
        """The test samples of the domains that a client has data of; all of them where there is one domain."""
        train, test = self.dataset.train, self.dataset.test
        if train.domains is None or test.domains is None or len(self.dataset.domains) < 2:
            return test
        own = torch.unique(train.domains[self.client(number).positions])
        chosen = torch.isin(test.domains, own).nonzero().squeeze(1)
        return Samples(test.inputs[chosen], test.labels[chosen], domains=test.domains[chosen])

    def client(self, number: int) -> ClientSamples:
        """The samples of client ``number``, counted from 0."""
        self.partition.client(number)  # refuses numbers that are out of range
        first, last = (int(end) for end in self.partition.offsets[number : number + 2])
        return ClientSamples(
            self.dataset.train, self._order[first:last], self.dataset.num_classes, self.dataset.normalisation
        )
