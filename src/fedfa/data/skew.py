"""A split in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedfa.data.federation import Federation


@dataclass(frozen=True)
class SplitSummary:
    """What a split did.

    Attributes:
        samples: Training samples in all.
        assigned: Those that some client holds.
        smallest: Size of the smallest client.
        median: Median size.
        largest: Size of the largest client.
        empty: Clients without samples.
        classes_held: Mean number of classes that a client with samples holds.
        label_skew: Mean total-variation distance between a client's label mix and that of all samples, clients weighted
            by size: 0 where every client is like the whole, towards 1 where they have nothing in common.
    """

    samples: int
    assigned: int
    smallest: int
    median: float
    largest: int
    empty: int
    classes_held: float
    label_skew: float


def summary(federation: Federation) -> SplitSummary:
    """Sum a split up."""
    split, dataset = federation.partition, federation.dataset
    sizes = split.sizes
    labels = dataset.train.labels.numpy()
    # Only the (client, class) pairs that occur: a full table of a million clients would be mostly zeros.
    pairs, counts = np.unique(split.owners() * dataset.num_classes + labels[split.order], return_counts=True)
    owners, held = np.divmod(pairs, dataset.num_classes)
    mix = np.bincount(labels[split.order], minlength=dataset.num_classes) / max(len(split.order), 1)
    share = counts / sizes[owners]
    # Σ max(share − mix, 0) over classes is the distance, and only classes that the client holds contribute.
    distance = np.bincount(owners, weights=np.maximum(share - mix[held], 0), minlength=len(split))
    return SplitSummary(
        samples=len(dataset.train),
        assigned=len(split.order),
        smallest=int(sizes.min()),
        median=float(np.median(sizes)),
        largest=int(sizes.max()),
        empty=int((sizes == 0).sum()),
        classes_held=len(pairs) / max(int((sizes > 0).sum()), 1),
        label_skew=float((distance * sizes).sum() / max(sizes.sum(), 1)),
    )
