"""Partitions by domain and by writer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedfa.data.partitions.assignment import IntArray, Partition
from fedfa.errors import DataError


def by_domain(domains: IntArray, clients: int, split_inside: Callable[[IntArray, int, int], Partition]) -> Partition:
    """Assign equally many clients to each domain.

    Args:
        domains: The domain of each sample.
        clients: Number of clients in all.
        split_inside: Called with positions, number of clients and domain; splits these samples over these clients.
    """
    count = int(domains.max()) + 1 if len(domains) else 0
    if count == 0 or clients % count or clients < count:
        nearest = max(1, round(clients / max(count, 1))) * count
        raise DataError(
            f"domains: {clients} clients cannot be spread evenly over {count} domains; use for example {nearest}"
        )
    per_domain = clients // count
    parts = []
    for number in range(count):
        positions = np.flatnonzero(domains == number)
        inner = split_inside(positions, per_domain, number)
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
