"""A partition as two flat arrays, so that its size depends on the samples and not on the number of clients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedfa.errors import DataError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """Which samples each client holds: client ``i`` holds ``order[offsets[i]:offsets[i + 1]]``.

    Attributes:
        order: Positions in the training samples, client after client.
        offsets: Where each client begins in ``order``; one more than there are clients.

    Example:
        >>> split = Partition.from_owners(np.array([1, 0, 1]), clients=3)
        >>> [split.client(i).tolist() for i in range(len(split))]
        [[1], [0, 2], []]
    """

    order: IntArray
    offsets: IntArray

    def __post_init__(self) -> None:
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.order) or np.any(np.diff(self.offsets) < 0):
            raise DataError("a partition's offsets must rise from 0 to the number of samples assigned")

    @classmethod
    def from_owners(cls, owners: IntArray, clients: int) -> Partition:
        """Make a partition from the owner of every sample; a negative owner leaves the sample unused."""
        positions = np.argsort(owners, kind="stable")
        sorted_owners = owners[positions]
        used = np.searchsorted(sorted_owners, 0)
        offsets = np.searchsorted(sorted_owners[used:], np.arange(clients + 1))
        return cls(positions[used:].astype(np.int64), offsets.astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def client(self, number: int) -> IntArray:
        """Positions of one client's samples, as a view."""
        if not 0 <= number < len(self):
            raise DataError(f"there is no client {number}: the partition has {len(self)} clients, numbered from 0")
        return self.order[self.offsets[number] : self.offsets[number + 1]]

    @cached_property
    def sizes(self) -> IntArray:
        """Number of samples of each client."""
        return np.diff(self.offsets)

    @cached_property
    def holders(self) -> IntArray:
        """The clients that hold samples. Cached: the time of a round must not grow with the number of clients."""
        return np.flatnonzero(self.sizes)

    def owners(self) -> IntArray:
        """The client of every entry of ``order``."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)

    def label_counts(self, labels: npt.ArrayLike, num_classes: int) -> IntArray:
        """Number of samples of each class and client, as ``[clients, classes]``."""
        of_order = np.asarray(labels)[self.order]
        cells = np.bincount(self.owners() * num_classes + of_order, minlength=len(self) * num_classes)
        return cells.reshape(len(self), num_classes).astype(np.int64)
