"""A client's samples as mini-batches: several are fetched at once, and what their labels tell is worked out once.

Beside the network the arithmetic of this is nothing, but each operation has to be started.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedfa.learning.stacking import SideBySide

FETCHED = 4 * 2**20
"""Bytes of inputs that are fetched at once, unless a single batch is larger."""


class Batches(Protocol):
    """What the loop needs of a client's data."""

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs ready for the network, and labels, at these positions."""


class Labels:
    """The labels of several batches, for what is worked out for all of them at once.

    Args:
        y: ``[…, n]``.
        size: Of a batch; the last one may be smaller.
        classes: How many there are.
    """

    def __init__(self, y: Tensor, size: int, classes: int) -> None:
        self._y, self._size, self._classes = y, size, classes
        self._weights: dict[tuple[float, torch.dtype], tuple[Tensor, ...]] = {}

    def class_weights(self, number: int, of_a_class: float, dtype: torch.dtype) -> Tensor:
        """Weights of the samples of a batch, ``[…, B, 1]``: those of each class it holds add up to ``of_a_class``.

        Example:
            >>> Labels(torch.tensor([3, 3, 5, 3]), 3, 6).class_weights(0, 1.0, torch.float32).flatten()
            tensor([0.5000, 0.5000, 1.0000])
        """
        found = self._weights.get((of_a_class, dtype))
        if found is None:
            codes = self._y + _first_codes(self._y.shape, self._size, self._classes, self._y.device)
            same_class = torch.bincount(codes.flatten())[codes]
            weights = of_a_class / same_class.to(dtype).unsqueeze(-1)
            found = self._weights[of_a_class, dtype] = torch.split(weights, self._size, -2)
        return found[number]


@lru_cache(maxsize=64)
def _first_codes(shape: torch.Size, size: int, classes: int, device: torch.device) -> Tensor:
    """For each sample the code of class 0 in its batch, where every class of every batch has a code of its own."""
    clients = torch.arange(shape[:-1].numel(), device=device).view(*shape[:-1], 1)
    batches = torch.arange(shape[-1], device=device) // size
    return (clients * shape[-1] + batches) * classes


class Fetched(NamedTuple):
    """A batch on its way to the network."""

    positions: Tensor
    """Of its samples in the client's own data."""
    x: Tensor
    y: Tensor
    place: tuple[Labels, int]
    """The labels of all batches that were fetched with this one, and which of them it is."""


class Fetching:
    """Fetches a client's batches.

    Args:
        data: The samples.
        size: Of a batch.
        classes: How many there are.
        device: Where the batches are needed.
    """

    def __init__(self, data: Batches | SideBySide, size: int, classes: int, device: torch.device) -> None:
        self._data, self._size, self._classes, self._device = data, size, classes, device
        self._at_once = 1

    def batches(self, order: Tensor, count: int) -> Iterator[Fetched]:
        """The samples in this order, as so many batches; the last one may be smaller.

        Args:
            order: Positions, ``[n]``, or ``[K, n]`` of clients side by side.
            count: How many batches are wanted.
        """
        if isinstance(self._data, SideBySide):  # they are few and small, and prepared already
            yield from islice(self._cut(order, *self._data.in_order(order)), count)
            return
        done = 0
        while done < count:
            positions = order[done * self._size : min(done + self._at_once, count) * self._size]
            inputs, labels = self._data.batch(positions)
            yield from self._cut(positions, inputs, labels)
            done += self._at_once
            # How many are fetched the next time: the first one has shown how large they are.
            self._at_once = max(1, FETCHED * len(positions) // max(1, inputs.nbytes * self._size))

    def _cut(self, positions: Tensor, inputs: Tensor, labels: Tensor) -> Iterator[Fetched]:
        inputs, labels = inputs.to(self._device), labels.to(self._device)
        pieces = (torch.split(each, self._size, labels.dim() - 1) for each in (positions, inputs, labels))
        together = Labels(labels, self._size, self._classes)
        for number, (index, x, y) in enumerate(zip(*pieces, strict=True)):
            yield Fetched(index, x, y, (together, number))
