"""Class features: the mean feature of each class on a client, gathered while it trains (FedFA's eq. 6 and 7).

FedFA makes its anchors of them, FedProc can make its prototypes of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedfa.learning.tensors import Tensors


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
    """Sums (or means) of this epoch, and counts."""
    batches: int = field(init=False)
    """Batches of this epoch so far."""
    previous: Tensor = field(init=False)
    """m^(k−1)"""
    averaged: Tensor = field(init=False)
    """ā"""

    def __post_init__(self) -> None:
        self.previous = self.averaged = self.start
        self._clear()

    def _clear(self) -> None:
        self.batches = 0
        self.epoch = {"sum": torch.zeros_like(self.start), "count": torch.zeros_like(self.start[..., :1])}

    def add(self, features: Tensor, membership: Tensor) -> None:
        """Take in the features of a batch (eq. 6), with the class each belongs to (see ``Batch.membership``)."""
        sums, counts = class_sums(features.detach(), membership)
        if self.class_mean == "batch":
            sums = sums / counts.clamp(min=1)
        self.epoch["sum"] += sums
        self.epoch["count"] += counts
        self.batches += 1

    def end_epoch(self, *, remember: bool = True) -> None:
        """The average over epochs (eq. 7); with ``remember=False`` it is the features of this epoch alone."""
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
    return membership.mT @ features, membership.sum(-2).unsqueeze(-1)


def membership(y: Tensor, classes: int, like: Tensor) -> Tensor:
    """Labels ``[…, N]`` as ones and zeros ``[…, N, C]`` of another tensor's type."""
    return functional.one_hot(y, classes).to(like.dtype)
