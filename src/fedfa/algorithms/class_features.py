"""Class features: the mean feature of each class on a client, gathered while it trains (FedFA's eq. 6 and 7).

FedFA makes its anchors of them, FedProc can make its prototypes of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedfa.learning.part import Batch
from fedfa.learning.tensors import Tensors
from fedfa.models.products import product

WAITING = 32
"""Batches whose features wait to be added up together."""


@dataclass
class ClassFeatures:
    """Accumulates the class features of one client over one round.

    Args:
        start: What the average over epochs starts from, ``[…, C, d]``.
        momentum: λ of eq. 7.
        class_mean: ``batch``: eq. 6, batch means divided by the number of batches (classes missing from a batch
            shrink). ``exact``: the true mean of the epoch's features of a class.
        average: ``two-epochs``: eq. 7, λ m^(k−1) + (1−λ) m^(k). ``running``: ā ← λ ā + (1−λ) m^(k).
    """

    start: Tensor
    momentum: float
    class_mean: Literal["batch", "exact"] = "exact"
    average: Literal["two-epochs", "running"] = "running"
    epoch: Tensors = field(init=False)
    """Sums (or sums of batch means) of this epoch, and counts."""
    batches: int = field(init=False)
    """Batches of this epoch so far."""
    waiting: list[tuple[Tensor, Tensor, Tensor | None]] = field(init=False)
    """Features and labels of batches that have not been added yet, and weights where the batches' means count."""
    previous: Tensor = field(init=False)
    """m^(k−1)"""
    averaged: Tensor = field(init=False)
    """ā"""

    def __post_init__(self) -> None:
        self.previous = self.averaged = self.start
        self._clear()

    def _clear(self) -> None:
        self.batches, self.waiting = 0, []
        self.epoch = {"sum": torch.zeros_like(self.start), "count": torch.zeros_like(self.start[..., :1])}

    def add(self, features: Tensor, batch: Batch) -> None:
        """Take in the features of a batch (eq. 6)."""
        weights = batch.class_weights(1.0) if self.class_mean == "batch" else None
        self.waiting.append((features.detach(), batch.y, weights))
        self.batches += 1
        if len(self.waiting) == WAITING:
            self.add_up()

    def add_up(self) -> None:
        """Add what is waiting: one product for many batches takes less time than one for each."""
        if not self.waiting:
            return
        each, labels, weights = zip(*self.waiting, strict=True)
        features, y = torch.cat(each, -2), torch.cat(labels, -1)
        self.waiting = []
        member = membership(y, self.start.shape[-2], features)
        self.epoch["count"] += member.sum(-2).unsqueeze(-1)
        if self.class_mean == "batch":  # a sum of batch means
            member = member * torch.cat(weights, -2)
        self.epoch["sum"] += product(member.mT, features)

    def end_epoch(self, *, remember: bool = True) -> None:
        """The average over epochs (eq. 7); with ``remember=False`` it is the features of this epoch alone."""
        self.add_up()
        if self.class_mean == "batch":
            mean = self.epoch["sum"] / max(1, self.batches)  # the batches there were: fewer if the steps are limited
        else:  # a class not met in this epoch (possible with drop_last) says nothing new
            count = self.epoch["count"]
            mean = torch.where(count > 0, self.epoch["sum"] / count.clamp(min=1), self.previous)
        before = self.previous if self.average == "two-epochs" else self.averaged
        self.averaged = self.momentum * before + (1 - self.momentum) * mean if remember else mean
        self.previous = mean
        self._clear()


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
