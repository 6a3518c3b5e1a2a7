"""How each kind of partition assigns training samples to clients."""

from __future__ import annotations

import numpy as np

from fedfa.data.partitions.assignment import IntArray, Partition
from fedfa.data.partitions.draws import cut, dirichlet_proportions, top_up
from fedfa.data.partitions.specs import (
    AnyPartition,
    Classes,
    Dirichlet,
    Domains,
    Iid,
    LabelPartition,
    Natural,
    Quantity,
    Shards,
)
from fedfa.data.samples import Samples
from fedfa.errors import DataError
from fedfa.learning.random import stream

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
        return _by_domain(data.domains.numpy(), all_labels, spec, clients, num_classes, seed)
    rng = stream(seed, f"partition:{spec.kind}")
    if isinstance(spec, Natural):
        if spec.groups is not None and spec.groups != clients:
            raise DataError(f"natural: {spec.groups} groups of writers, but {clients} clients; set only one of the two")
        return by_writer(_writers(data), clients, rng)
    return _by_label(all_labels, spec, clients, num_classes, rng)


def _by_label(
    of: IntArray, spec: LabelPartition, clients: int, num_classes: int, rng: np.random.Generator
) -> Partition:
    match spec:
        case Iid():
            return iid(of, clients, rng)
        case Shards():
            return shards(of, spec, clients, rng)
        case Classes():
            return classes(of, spec, clients, num_classes, rng)
        case Dirichlet():
            return dirichlet(of, spec, clients, num_classes, rng)
        case Quantity():
            return quantity(of, spec, clients, rng)


def _writers(data: Samples) -> IntArray:
    if data.writers is None:
        raise DataError("natural: this data set has no writers; mnist-writers and femnist have")
    return data.writers.numpy()


def _by_domain(
    domains: IntArray, labels: IntArray, spec: Domains, clients: int, num_classes: int, seed: int
) -> Partition:
    """Assign equally many clients to each domain, and split its samples over them."""
    count = int(domains.max()) + 1 if len(domains) else 0
    if count == 0 or clients % count or clients < count:
        nearest = max(1, round(clients / max(count, 1))) * count
        raise DataError(
            f"domains: {clients} clients cannot be spread evenly over {count} domains; use for example {nearest}"
        )
    parts = []
    for number in range(count):
        positions = np.flatnonzero(domains == number)
        rng = stream(seed, f"partition:{spec.kind}/{spec.inner.kind}", number)
        inner = _by_label(labels[positions], spec.inner, clients // count, num_classes, rng)
        parts.append((positions[inner.order], inner.sizes))
    order = np.concatenate([order for order, _ in parts])
    sizes = np.concatenate([sizes for _, sizes in parts])
    return Partition(order, np.concatenate([[0], np.cumsum(sizes)]))


def by_writer(writers: IntArray, clients: int, rng: np.random.Generator) -> Partition:
    """One client per writer, in order of their ids; with fewer clients the writers are assigned at random, evenly."""
    ids, writer_of = np.unique(writers, return_inverse=True)
    if clients > len(ids):
        raise DataError(f"natural: {clients} clients requested, but there are only {len(ids)} writers")
    owner_of_writer = np.arange(len(ids))
    if clients < len(ids):
        owner_of_writer = rng.permutation(len(ids)) * clients // len(ids)
    return Partition.from_owners(owner_of_writer[writer_of].astype(np.int64), clients)


def iid(labels: IntArray, clients: int, rng: np.random.Generator) -> Partition:
    """A random permutation cut into equal pieces."""
    sizes = _equal_sizes(len(labels), clients)
    return Partition(rng.permutation(len(labels)).astype(np.int64), np.concatenate([[0], np.cumsum(sizes)]))


def shards(labels: IntArray, spec: Shards, clients: int, rng: np.random.Generator) -> Partition:
    """Sort by label, cut into k·N equal shards, assign k to each client."""
    per_client = spec.classes_per_client
    total = per_client * clients
    if total > len(labels):
        raise DataError(
            f"shards: {clients:,} clients × {per_client} shards need at least {total:,} samples, but there are "
            f"{len(labels):,}; use fewer clients or fewer classes per client"
        )
    by_label = np.argsort(labels, kind="stable")
    owner_of_shard = np.empty(total, dtype=np.int64)
    owner_of_shard[rng.permutation(total)] = np.repeat(np.arange(clients), per_client)
    owners = np.empty(len(labels), dtype=np.int64)
    owners[by_label] = np.repeat(owner_of_shard, _equal_sizes(len(labels), total))
    return Partition.from_owners(owners, clients)


def classes(labels: IntArray, spec: Classes, clients: int, num_classes: int, rng: np.random.Generator) -> Partition:
    """Exactly k distinct classes per client."""
    if spec.classes_per_client > num_classes:
        raise DataError(f"classes: {spec.classes_per_client} classes per client, but there are only {num_classes}")
    held = _deal_classes(clients, spec.classes_per_client, num_classes, rng)
    owners = np.full(len(labels), -1, dtype=np.int64)
    for label in range(num_classes):
        samples = rng.permutation(np.flatnonzero(labels == label))
        holders = rng.permutation(np.flatnonzero((held == label).any(axis=1)))
        if not len(holders):
            continue  # fewer places than classes: no client holds this one
        each = spec.samples_per_class
        if len(samples) < len(holders) * (each or 1):
            raise DataError(
                f"classes: class {label} has {len(samples):,} samples, but {len(holders):,} clients hold it and need "
                f"{each or 'at least 1'} each; use fewer clients, fewer classes per client or fewer samples per class"
            )
        if each is None:
            owners[samples] = np.repeat(holders, _equal_sizes(len(samples), len(holders)))
        else:
            owners[samples[: len(holders) * each]] = np.repeat(holders, each)
    return Partition.from_owners(owners, clients)


def dirichlet(labels: IntArray, spec: Dirichlet, clients: int, num_classes: int, rng: np.random.Generator) -> Partition:
    """Each class spread over the clients in proportions from Dir(α)."""
    _check_min_size("dirichlet", len(labels), clients, spec.min_size)
    for _ in range(spec.redraws if spec.short == "redraw" else 1):
        owners = np.empty(len(labels), dtype=np.int64)
        for label in range(num_classes):
            samples = rng.permutation(np.flatnonzero(labels == label))
            owners[samples] = cut(len(samples), dirichlet_proportions(spec.alpha, clients, rng), rng)
        split = Partition.from_owners(owners, clients)
        if split.sizes.min() >= spec.min_size:
            return split
    if spec.short == "redraw":
        raise DataError(
            f"dirichlet: in {spec.redraws} draws some client always had fewer than min_size = {spec.min_size} samples; "
            f"use a larger alpha than {spec.alpha:g}, fewer clients, a smaller min_size, or short = 'top-up'"
        )
    return top_up(split, spec.min_size, rng)


def quantity(labels: IntArray, spec: Quantity, clients: int, rng: np.random.Generator) -> Partition:
    """Random samples, sizes in proportions from Dir(α)."""
    _check_min_size("quantity", len(labels), clients, spec.min_size)
    owners = np.empty(len(labels), dtype=np.int64)
    owners[rng.permutation(len(labels))] = cut(len(labels), dirichlet_proportions(spec.alpha, clients, rng), rng)
    return top_up(Partition.from_owners(owners, clients), spec.min_size, rng)


def _check_min_size(kind: str, samples: int, clients: int, min_size: int) -> None:
    if clients * min_size > samples:
        raise DataError(
            f"{kind}: {clients:,} clients cannot each hold min_size = {min_size} of {samples:,} samples; "
            f"use at most {samples // min_size:,} clients, or min_size = {samples // clients}"
            + (" (clients may then be empty)" if samples < clients else "")
        )


def _equal_sizes(total: int, parts: int) -> IntArray:
    """``parts`` sizes that sum to ``total`` and differ by at most one, the larger ones spread evenly."""
    ends = np.arange(parts + 1, dtype=np.int64) * total // parts
    return np.diff(ends)


def _deal_classes(clients: int, per_client: int, num_classes: int, rng: np.random.Generator) -> IntArray:
    """``[clients, per_client]`` distinct classes per row, every class in equally many rows (to within one).

    Rows are dealt from a stack of shuffled decks. A deck holds every class once, which gives the balance. Where a row
    takes its last cards from the next deck, that deck is shuffled under the condition that its first cards do not
    repeat the row's. Decks and rows end together after ``lcm(per_client, num_classes)`` cards, so stacks of that size
    are independent and are dealt at once: the loop runs over the decks of a stack, not over clients.
    """
    together = int(np.lcm(per_client, num_classes))
    rows_per_stack = together // per_client
    stacks = -(-clients // rows_per_stack)
    cards = np.empty((stacks, together), dtype=np.int64)
    every_stack = np.arange(stacks)[:, None]
    for start in range(0, together, num_classes):
        held_over = start % per_client  # cards of the current row that came from the previous deck
        keys = rng.random((stacks, num_classes))
        if held_over:
            taken = np.zeros((stacks, num_classes), dtype=bool)
            taken[every_stack, cards[:, start - held_over : start]] = True
            first = np.argsort(keys + taken, axis=1)[:, : per_client - held_over]
            keys = rng.random((stacks, num_classes))
            keys[every_stack, first] -= 1  # these come before all others
        cards[:, start : start + num_classes] = np.argsort(keys, axis=1)
    rows = cards.reshape(stacks * rows_per_stack, per_client)[:clients]
    return rows[rng.permutation(clients)]
