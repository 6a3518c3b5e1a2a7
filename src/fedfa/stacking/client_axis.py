"""Values of several clients joined along a leading client axis, and split again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor


def signature(value: Any) -> Hashable:
    """What two clients' values must have in common to be joined: structure, shapes, and everything but tensors."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return tuple((key, signature(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return (type(value), *(signature(item) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(signature(item) for item in vars(value).values()))
    return (type(value), value if value is None or isinstance(value, bool | int | float | str) else id(value))


def join(values: Sequence[Any]) -> Any:
    """The values of several clients as one: tensors are stacked, containers joined item by item.

    Example:
        >>> join([{"shift": torch.tensor([1, 2]), "steps": 3}, {"shift": torch.tensor([5, 6]), "steps": 3}])
        {'shift': tensor([[1, 2],
                [5, 6]]), 'steps': 3}
    """
    return _map(lambda *tensors: torch.stack(tensors), *values)


def slice_of(value: Any, client: int) -> Any:
    """One client's slice of a joined value; tensors are views."""
    return _map(lambda tensor: tensor[client], value)


def _map(change: Callable[..., Tensor], *values: Any) -> Any:
    """Values of one structure as one of the same structure: tensors are changed, of anything else the first is kept."""
    first = values[0]
    if isinstance(first, Tensor):
        return change(*values)
    if isinstance(first, dict):
        return {key: _map(change, *(value[key] for value in values)) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_map(change, *items) for items in zip(*values, strict=True))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        made = copy.copy(first)
        for name in vars(first):
            setattr(made, name, _map(change, *(getattr(value, name) for value in values)))
        return made
    return first


class _Samples(Protocol):
    @property
    def size(self) -> int: ...

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]: ...


class StackedSamples:
    """The samples of several clients of one size, prepared for the network once."""

    def __init__(self, each: Sequence[_Samples]) -> None:
        if all(hasattr(samples, "at") for samples in each):  # subsets of common data: one access serves all
            subsets = cast(Sequence[Any], each)
            inputs, labels = subsets[0].at(torch.cat([samples.positions for samples in subsets]))
        else:
            everything = torch.arange(each[0].size)
            inputs, labels = (torch.cat(v) for v in zip(*(samples.batch(everything) for samples in each), strict=True))
        self._inputs: Tensor = inputs
        self._labels: Tensor = labels
        self._first = torch.arange(0, len(labels), each[0].size).unsqueeze(1)

    @property
    def nbytes(self) -> int:
        """Size of the inputs."""
        return self._inputs.nbytes

    def in_order(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Rearranged by positions ``[…, K, n]``: inputs ``[…, K, n, …]`` and labels ``[…, K, n]``."""
        positions = (order + self._first).flatten()
        inputs = self._inputs.index_select(0, positions).view(*order.shape, *self._inputs.shape[1:])
        return inputs, self._labels.index_select(0, positions).view(order.shape)
