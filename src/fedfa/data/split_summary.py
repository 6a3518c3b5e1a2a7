"""Key figures of a split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fedfa.data.federation import Federation


@dataclass(frozen=True)
class SplitSummary:
    """Key figures of a split; as text, one line.

    Attributes:
        clients: Number of clients.
        samples: Number of training samples.
        assigned: Number of samples that a client holds.
        smallest: Size of the smallest client.
        median: Median size.
        largest: Size of the largest client.
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


def summary(federation: Federation) -> SplitSummary:
    """Compute the key figures of a split."""
    split, dataset = federation.partition, federation.dataset
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
