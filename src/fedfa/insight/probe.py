"""The probe: a few test samples on which all models of a round are looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfa.data import DataSet
from fedfa.learning.random import stream


@dataclass(frozen=True, eq=False)
class Probe:
    """Test samples, ready for a network.

    Attributes:
        inputs: Normalised, ``[n, …]``.
        labels: ``[n]``.
        domains: Domain of each, where there are several.
        positions: Where they stand in the test set, ascending.
    """

    inputs: Tensor
    labels: Tensor
    domains: Tensor | None
    positions: Tensor

    @classmethod
    def of(cls, dataset: DataSet, samples: int, seed: int) -> Probe:
        """The same samples for every run on these data with this seed.

        Args:
            dataset: The data; the probe is taken from their test set.
            samples: How many; all of them if there are fewer.
            seed: Of the data's split: methods and training seeds that are compared share one probe.
        """
        test = dataset.test
        several = test.domains is not None and len(dataset.domains) > 1
        domains = test.domains if several else None
        positions = torch.from_numpy(even_subset(test.labels.numpy(), domains, samples, seed))
        return cls(
            # One batch in the standard memory order: what clients receive has it too, however it came to them.
            dataset.normalisation.batch(test.inputs[positions]).contiguous(),
            test.labels[positions],
            None if domains is None else domains[positions],
            positions,
        )


def even_subset(labels: np.ndarray, domains: Tensor | None, samples: int, seed: int) -> np.ndarray:
    """Positions of so many samples, spread evenly over domains and classes, ascending.

    Example:
        >>> chosen = even_subset(np.array([0, 0, 0, 0, 1, 1]), None, 4, seed=1)
        >>> np.array([0, 0, 0, 0, 1, 1])[chosen].tolist()
        [0, 0, 1, 1]
    """
    return np.sort(dealt(labels, None if domains is None else domains.numpy(), seed)[:samples])


def dealt(labels: np.ndarray, domains: np.ndarray | None, seed: int) -> np.ndarray:
    """All positions, in turns: one sample of each class of each domain, another of each, until all are dealt.

    Every class of every domain is shuffled; one that has too few is left out of the later turns.
    """
    where = np.zeros_like(labels) if domains is None else domains
    turn, of = np.zeros(len(labels), dtype=np.int64), np.zeros(len(labels), dtype=np.int64)
    for number, (domain, label) in enumerate(sorted(set(zip(where.tolist(), labels.tolist(), strict=True)))):
        members = np.flatnonzero((where == domain) & (labels == label))
        turn[stream(seed, "probe", domain, label).permutation(members)] = np.arange(len(members))
        of[members] = number
    return np.lexsort((of, turn))
