"""A client's samples as mini-batches: several are fetched at once, and what their labels tell is worked out once.

Beside the network the arithmetic of this is nothing, but each operation has to be started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedfa.learning.stacking import SideBySide

FETCHED = 4 * 2**20
"""Bytes of inputs that are fetched at once, unless a single batch (of clients side by side: an epoch) is larger."""


class Batches(Protocol):
    """What the loop needs of a client's data."""

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs ready for the network, and labels, at these positions."""


class Labels:
    """The labels of several batches, for what is worked out for all of them at once.

    Args:
        y: ``[n]``, ``[K, n]`` of clients side by side, or ``[E, K, n]`` of several epochs of them.
        size: Of a batch; the last one of an epoch may be smaller.
        classes: How many there are.
    """

    def __init__(self, y: Tensor, size: int, classes: int) -> None:
        self._y, self._size, self._classes = y, size, classes
        self._weights: dict[tuple[float, torch.dtype], Sequence[Tensor]] = {}
        self._targets: dict[torch.dtype, Sequence[Tensor]] = {}

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
            found = self._weights[of_a_class, dtype] = _cut(weights, self._size, self._y.dim())
        return found[number]

    def targets(self, number: int, dtype: torch.dtype) -> Tensor:
        """The gradient of a batch's mean cross-entropy with respect to the log-softmax, ``[…, B, C]``.

        Example:
            >>> Labels(torch.tensor([1, 0, 1]), 2, 2).targets(0, torch.float32)
            tensor([[ 0.0000, -0.5000],
                    [-0.5000,  0.0000]])
        """
        found = self._targets.get(dtype)
        if found is None:
            y = self._y.unsqueeze(-1)
            shares = _shares(self._y.shape[-1], self._size, dtype, self._y.device).expand(y.shape)
            zeros = shares.new_zeros((*self._y.shape, self._classes))
            found = self._targets[dtype] = _cut(zeros.scatter_(-1, y, shares), self._size, self._y.dim())
        return found[number]


def _cut(values: Tensor, size: int, dimensions: int) -> Sequence[Tensor]:
    """Values that belong to labels of so many dimensions, batch by batch, epoch by epoch."""
    pieces = torch.split(values, size, dimensions - 1)
    if dimensions < 3:
        return pieces
    return [batch for epoch in zip(*(piece.unbind(0) for piece in pieces), strict=True) for batch in epoch]


@lru_cache(maxsize=64)
def _shares(samples: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each sample −1/B with the number B of samples in its batch, ``[n, 1]``."""
    whole = samples - samples % size
    shares = [-1 / size] * whole + [-1 / max(1, samples - whole)] * (samples - whole)
    return torch.tensor(shares, dtype=dtype, device=device).unsqueeze(-1)


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

    def epochs(
        self, shuffles: Sequence[np.random.Generator], samples: int, counts: Sequence[int]
    ) -> Iterator[Iterator[Fetched]]:
        """The batches of each epoch, in an order that is drawn for it.

        Args:
            shuffles: The stream that orders the samples; one for each client where there are several.
            samples: Of a client.
            counts: How many batches of each epoch are wanted.
        """
        if isinstance(self._data, SideBySide):
            yield from self._epochs_side_by_side(self._data, shuffles, samples, counts)
            return
        for count in counts:
            yield self.batches(torch.from_numpy(shuffles[0].permutation(samples)), count)

    def batches(self, order: Tensor, count: int) -> Iterator[Fetched]:
        """A client's samples in this order, ``[n]``, as so many batches; the last one may be smaller."""
        assert not isinstance(self._data, SideBySide)
        done = 0
        while done < count:
            positions = order[done * self._size : min(done + self._at_once, count) * self._size]
            inputs, labels = self._data.batch(positions)
            yield from self._pieces(positions, inputs, labels)
            done += self._at_once
            # How many are fetched the next time: the first one has shown how large they are.
            self._at_once = max(1, FETCHED * len(positions) // max(1, inputs.nbytes * self._size))

    def _epochs_side_by_side(
        self, data: SideBySide, shuffles: Sequence[np.random.Generator], samples: int, counts: Sequence[int]
    ) -> Iterator[Iterator[Fetched]]:
        """Several epochs are arranged at once: where clients are small, starting the operations for each one shows."""
        at_once = max(1, FETCHED // max(1, data.nbytes))
        for first in range(0, len(counts), at_once):
            some = counts[first : first + at_once]
            orders = np.stack([shuffle.permutation(samples) for _ in some for shuffle in shuffles])
            order = torch.from_numpy(orders).view(len(some), len(shuffles), samples)
            pieces = self._pieces(order, *data.in_order(order))
            in_an_epoch = max(1, -(-samples // self._size))
            for count in some:
                epoch = list(islice(pieces, in_an_epoch))
                yield iter(epoch[:count])

    def _pieces(self, positions: Tensor, inputs: Tensor, labels: Tensor) -> Iterator[Fetched]:
        inputs, labels = inputs.to(self._device), labels.to(self._device)
        pieces = (_cut(each, self._size, labels.dim()) for each in (positions, inputs, labels))
        together = Labels(labels, self._size, self._classes)
        for number, (index, x, y) in enumerate(zip(*pieces, strict=True)):
            yield Fetched(index, x, y, (together, number))
