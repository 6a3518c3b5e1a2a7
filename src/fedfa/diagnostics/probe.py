"""The probe: test samples on which all models of a round are measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfa.data import DataSet
from fedfa.learning.random import stream


@dataclass(frozen=True, eq=False)
class Probe:
    """Normalised test samples.

    Attributes:
        inputs: Normalised, ``[n, …]``.
        labels: ``[n]``.
        domains: Domain of each sample, if the data set has several.
        positions: Ascending indices into the test set.
    """

    inputs: Tensor
    labels: Tensor
    domains: Tensor | None
    positions: Tensor

    @classmethod
    def of(cls, dataset: DataSet, samples: int, seed: int) -> Probe:
        """Select the same samples for every run with this data set and seed.

        Args:
            dataset: The probe is drawn from its test set.
            samples: Size of the probe; the whole test set if that is smaller.
            seed: Seed of the data split, so that compared algorithms and training seeds share one probe.
        """
        test = dataset.test
        several = test.domains is not None and len(dataset.domains) > 1
        domains = test.domains if several else None
        positions = torch.from_numpy(balanced_subset(test.labels.numpy(), domains, samples, seed))
        return cls(
            # Contiguous, as clients receive it from every engine: the memory order affects rounding.
            dataset.normalisation.batch(test.inputs[positions]).contiguous(),
            test.labels[positions],
            None if domains is None else domains[positions],
            positions,
        )


def balanced_subset(labels: np.ndarray, domains: Tensor | None, samples: int, seed: int) -> np.ndarray:
    """Select samples, balanced over domains and classes, and return their ascending positions.

    Example:
        >>> chosen = balanced_subset(np.array([0, 0, 0, 0, 1, 1]), None, 4, seed=1)
        >>> np.array([0, 0, 0, 0, 1, 1])[chosen].tolist()
        [0, 0, 1, 1]
    """
    return np.sort(balanced_order(labels, None if domains is None else domains.numpy(), seed)[:samples])


def balanced_order(labels: np.ndarray, domains: np.ndarray | None, seed: int) -> np.ndarray:
    """Order all positions round-robin: one sample of each class of each domain, then another of each, and so on.

    Every class of every domain is shuffled; exhausted ones are skipped.
    """
    domains = np.zeros_like(labels) if domains is None else domains
    rank, group = np.zeros((2, len(labels)), dtype=np.int64)
    for number, (domain, label) in enumerate(sorted(set(zip(domains.tolist(), labels.tolist(), strict=True)))):
        members = np.flatnonzero((domains == domain) & (labels == label))
        rank[stream(seed, "probe", domain, label).permutation(members)] = np.arange(len(members))
        group[members] = number
    return np.lexsort((group, rank))
