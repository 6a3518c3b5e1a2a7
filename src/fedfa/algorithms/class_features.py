"""Class features: the mean feature of each class on a client, accumulated while it trains (FedFA's eq. 6).

FedFA makes its anchors of them, FedProc can make its prototypes of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedfa.learning.context import Batch
from fedfa.learning.tensors import Tensors
from fedfa.stacking.products import product

WAITING = 32
"""Number of batches whose features are added in one product."""


@dataclass
class ClassFeatures:
    """Accumulates the class features of one client over one round.

    Args:
        start: Where the average over epochs starts, ``[…, C, d]``.
        class_mean: ``batch``: eq. 6, batch means divided by the number of batches (classes missing from a batch
            shrink). ``exact``: the true mean of the epoch's features of a class.
    """

    start: Tensor
    class_mean: Literal["batch", "exact"] = "exact"
    epoch: Tensors = field(init=False)
    """Sums (or sums of batch means) of this epoch, and counts."""
    batches: int = field(init=False)
    """Batches of this epoch so far."""
    waiting: list[tuple[Tensor, Tensor, Tensor | None]] = field(init=False)
    """Features and labels of batches that have not been added yet, and class counts where batch means are summed."""
    previous: Tensor = field(init=False)
    """m^(k−1), the class means of the epoch before."""
    averaged: Tensor = field(init=False)
    """ā, the average over epochs (eq. 7), which the method renews."""

    def __post_init__(self) -> None:
        self.previous = self.averaged = self.start
        self._clear()

    def _clear(self) -> None:
        self.batches, self.waiting = 0, []
        self.epoch = {"sum": torch.zeros_like(self.start), "count": torch.zeros_like(self.start[..., :1])}

    def add(self, features: Tensor, batch: Batch) -> None:
        """Take in the features of a batch (eq. 6)."""
        counts = batch.class_counts() if self.class_mean == "batch" else None
        self.waiting.append((features.detach(), batch.y, counts))
        self.batches += 1
        if len(self.waiting) == WAITING:
            self.add_waiting()

    def add_waiting(self) -> None:
        """Add the batches that wait: one product for many batches is faster than one for each."""
        if not self.waiting:
            return
        each, labels, counts = zip(*self.waiting, strict=True)
        features, y = torch.cat(each, -2), torch.cat(labels, -1)
        self.waiting = []
        member = membership(y, self.start.shape[-2], features)
        self.epoch["count"] += member.sum(-2).unsqueeze(-1)
        if self.class_mean == "batch":  # a sum of batch means
            member = member * (1.0 / torch.cat(counts, -2))
        self.epoch["sum"] += product(member.mT, features)

    def end_epoch(self) -> Tensor:
        """The class features m^(k) of the epoch; the next epoch starts empty."""
        self.add_waiting()
        if self.class_mean == "batch":
            mean = self.epoch["sum"] / max(1, self.batches)  # fewer than planned where the steps are limited
        else:  # a class without samples in this epoch (possible with drop_last) keeps its mean
            count = self.epoch["count"]
            mean = torch.where(count > 0, self.epoch["sum"] / count.clamp(min=1), self.previous)
        self._clear()
        return mean


def class_sums(features: Tensor, membership: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the features of each class, ``[…, C, d]``, and the number of them, ``[…, C, 1]``.

    Args:
        features: ``[…, N, d]``.
        membership: Ones and zeros, which sample is of which class, ``[…, N, C]``.
    """
    return product(membership.mT, features), membership.sum(-2).unsqueeze(-1)


def membership(y: Tensor, classes: int, like: Tensor) -> Tensor:
    """Labels ``[…, N]`` as ones and zeros ``[…, N, C]`` of another tensor's type."""
    return like.new_zeros((*y.shape, classes)).scatter_(-1, y.unsqueeze(-1), 1)
