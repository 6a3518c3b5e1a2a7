"""Partitions: which client holds which training samples."""

from __future__ import annotations

import numpy as np

from fedfa.data.partitions import groups, labels
from fedfa.data.partitions.assignment import IntArray, Partition
from fedfa.data.partitions.specs import (
    AnyPartition,
    Classes,
    Dirichlet,
    Domains,
    Iid,
    LabelPartition,
    Natural,
    PartitionSpec,
    Quantity,
    Shards,
    parse_partition,
    partition_text,
)
from fedfa.data.samples import Samples
from fedfa.errors import DataError
from fedfa.learning.random import stream

__all__ = [
    "AnyPartition",
    "Classes",
    "Dirichlet",
    "Domains",
    "Iid",
    "IntArray",
    "Natural",
    "Partition",
    "PartitionSpec",
    "Quantity",
    "Shards",
    "number_of_clients",
    "parse_partition",
    "partition",
    "partition_text",
]

_MOST_CLIENTS = 10**7
"""Beyond it the offsets alone would fill the memory."""


def number_of_clients(spec: AnyPartition, clients: int | None) -> int | None:
    """The given number of clients, else the default: 100, or None for ``natural``, where the data determine it."""
    return clients if clients is not None or isinstance(spec, Natural) else 100


def partition(data: Samples, spec: AnyPartition, clients: int | None, num_classes: int, seed: int) -> Partition:
    """Split samples over clients.

    Args:
        data: The training samples.
        spec: Specification of the partition.
        clients: Number of clients. With ``natural``, None means one per writer (or per group).
        num_classes: Number of classes.
        seed: Seed of the split. Its random streams are separate from those of the training.

    Returns:
        Disjoint clients that together hold every sample, unless the specification sets how many samples to take.

    Example:
        >>> import torch
        >>> data = Samples(torch.zeros(6, 1), torch.tensor([0, 0, 0, 1, 1, 1]))
        >>> partition(data, Shards(classes_per_client=1), clients=2, num_classes=2, seed=1).sizes.tolist()
        [3, 3]
    """
    if len(data) == 0:
        raise DataError("there are no samples to split")
    if clients is None:
        if not isinstance(spec, Natural):
            raise DataError(f"the partition {spec.kind!r} needs a number of clients")
        clients = spec.groups or len(np.unique(_writers(data)))
    if clients > _MOST_CLIENTS:
        raise DataError(f"data.clients = {clients}: a partition has at most {_MOST_CLIENTS} clients")
    if clients < 1:
        raise DataError(f"a split needs at least one client, not {clients}")
    all_labels = data.labels.numpy()
    if int(all_labels.max()) >= num_classes or int(all_labels.min()) < 0:
        span = f"{all_labels.min()} to {all_labels.max()}"
        raise DataError(f"labels run from {span}, but there are {num_classes} classes")

    if isinstance(spec, Domains):
        if data.domains is None:
            raise DataError("domains: this data set has one domain only; mixed-digits has five")

        def split_inside(positions: IntArray, share: int, domain: int) -> Partition:
            rng = stream(seed, f"partition:{spec.kind}/{spec.inner.kind}", domain)
            return _by_label(all_labels[positions], spec.inner, share, num_classes, rng)

        return groups.by_domain(data.domains.numpy(), clients, split_inside)
    rng = stream(seed, f"partition:{spec.kind}")
    if isinstance(spec, Natural):
        if spec.groups is not None and spec.groups != clients:
            raise DataError(f"natural: {spec.groups} groups of writers, but {clients} clients; set only one of the two")
        return groups.by_writer(_writers(data), clients, rng)
    return _by_label(all_labels, spec, clients, num_classes, rng)


def _by_label(
    of: IntArray, spec: LabelPartition, clients: int, num_classes: int, rng: np.random.Generator
) -> Partition:
    match spec:
        case Iid():
            return labels.iid(of, clients, rng)
        case Shards():
            return labels.shards(of, spec, clients, rng)
        case Classes():
            return labels.classes(of, spec, clients, num_classes, rng)
        case Dirichlet():
            return labels.dirichlet(of, spec, clients, num_classes, rng)
        case Quantity():
            return labels.quantity(of, spec, clients, rng)


def _writers(data: Samples) -> IntArray:
    if data.writers is None:
        raise DataError("natural: this data set has no writers; mnist-writers and femnist have")
    return data.writers.numpy()
