"""A client's samples as mini-batches. Several batches are fetched at once to start fewer operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedfa.trees import NetworkInput, form_of, nbytes_of, pieces_of, to_device

FETCHED = 4 * 2**20
"""Bytes of inputs that are fetched at once, unless a single batch is larger."""


class Batches(Protocol):
    """What the local loop needs of a client's data."""

    def batch(self, positions: Tensor) -> tuple[NetworkInput, Tensor]:
        """Inputs ready for the network, and labels, at these positions."""


class Labels:
    """The labels of several batches, for quantities that are computed for all of them at once.

    Args:
        y: ``[n]``; with a client axis ``[K, n]``, or ``[E, K, n]`` for several epochs.
        size: Batch size; the last batch of an epoch may be smaller.
        classes: Number of classes.
    """

    def __init__(self, y: Tensor, size: int, classes: int) -> None:
        self._y, self._size, self._classes = y, size, classes
        self._counts: dict[torch.dtype, Sequence[Tensor]] = {}
        self._targets: dict[torch.dtype, Sequence[Tensor]] = {}

    def class_counts(self, number: int, dtype: torch.dtype) -> Tensor:
        """For each sample of a batch the number of samples of its class in it, ``[…, B, 1]``.

        Example:
            >>> Labels(torch.tensor([3, 3, 5, 3]), 3, 6).class_counts(0, torch.float32).flatten()
            tensor([2., 2., 1.])
        """
        found = self._counts.get(dtype)
        if found is None:
            codes = self._y + _first_codes(self._y.shape, self._size, self._classes, self._y.device)
            counts = torch.bincount(codes.flatten())[codes].to(dtype).unsqueeze(-1)
            found = self._counts[dtype] = split_batches(counts, self._size, self._y.dim())
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
            found = self._targets[dtype] = split_batches(zeros.scatter_(-1, y, shares), self._size, self._y.dim())
        return found[number]


def split_batches(values: Tensor, size: int, dimensions: int) -> Sequence[Tensor]:
    """Values that belong to labels of this many dimensions, batch by batch, epoch by epoch."""
    pieces = torch.split(values, size, dimensions - 1)
    if dimensions < 3:
        return pieces
    return [batch for epoch in zip(*(piece.unbind(0) for piece in pieces), strict=True) for batch in epoch]


@lru_cache(maxsize=64)
def _shares(samples: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each sample −1/B with the size B of its batch, ``[n, 1]``."""
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
    """A batch on the network's device."""

    positions: Tensor
    """Of its samples in the client's own data."""
    x: NetworkInput
    y: Tensor
    place: tuple[Labels, int]
    """The labels of all batches that were fetched together, and the position of this batch among them."""


class Fetching:
    """Fetches a client's batches.

    Args:
        data: The samples.
        size: Batch size.
        classes: Number of classes.
        device: Where the batches are needed.
    """

    def __init__(self, data: Batches, size: int, classes: int, device: torch.device) -> None:
        self._data, self._size, self._classes, self._device = data, size, classes, device
        self._at_once = 1

    def epochs(self, shuffle: np.random.Generator, samples: int, counts: Sequence[int]) -> Iterator[Iterator[Fetched]]:
        """The batches of each epoch, in an order that is drawn for the epoch.

        Args:
            shuffle: The random stream that orders the samples.
            samples: Number of samples of the client.
            counts: Number of batches in each epoch.
        """
        for count in counts:
            yield self.batches(torch.from_numpy(shuffle.permutation(samples)), count)

    def batches(self, order: Tensor, count: int) -> Iterator[Fetched]:
        """A client's samples in this order, ``[n]``, as ``count`` batches; the last one may be smaller."""
        done = 0
        while done < count:
            positions = order[done * self._size : min(done + self._at_once, count) * self._size]
            inputs, labels = self._data.batch(positions)
            yield from cut_batches(positions, inputs, labels, self._size, self._classes, self._device)
            done += self._at_once
            # The first fetch shows how large batches are.
            self._at_once = max(1, FETCHED * len(positions) // max(1, nbytes_of(inputs) * self._size))


def cut_batches(
    positions: Tensor, inputs: NetworkInput, labels: Tensor, size: int, classes: int, device: torch.device
) -> Iterator[Fetched]:
    """What was fetched at once, batch by batch, on the device."""
    inputs, labels = to_device(inputs, device), labels.to(device)

    def split(each: Tensor) -> Sequence[Tensor]:
        return split_batches(each, size, labels.dim())

    together = Labels(labels, size, classes)
    pieces = split(positions), pieces_of(inputs, split), split(labels)
    for number, (index, x, y) in enumerate(zip(*pieces, strict=True)):
        yield Fetched(index, x, y, (together, number))


def augmented(
    batches: Iterator[Fetched],
    augmentation: Callable[[NetworkInput, np.random.Generator], NetworkInput],
    rng: np.random.Generator,
) -> Iterator[Fetched]:
    """Batches changed at random, one after the other.

    Raises:
        TypeError: The augmentation returned something else than a batch of the same form.
    """
    for fetched in batches:
        changed = augmentation(fetched.x, rng)
        if (found := form_of(changed)) != (expected := form_of(fetched.x)):
            raise TypeError(f"the augmentation returned {found} for {expected}; return a batch of the same form")
        yield fetched._replace(x=changed)
