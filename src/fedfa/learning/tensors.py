"""Named tensors: the one form in which anything lives longer than a function call.

Server state, broadcasts, client state and contributions are all ``dict[str, Tensor]``, nested at
most once by the name of the component they belong to. One form means one checkpoint, one wire format and one resume.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

Tensors: TypeAlias = dict[str, Tensor]
"""Named tensors, e.g. ``{"conv1.weight": …}``."""

_FEW = 1_000_000
"""Up to this many numbers, copying into one tensor is faster than checking tensor by tensor."""

NameT = TypeVar("NameT", bound=Hashable)

ComponentTensors: TypeAlias = dict[str, Tensors]
"""Named tensors by the component they belong to, e.g. ``{"anchors": {"anchors": …}}``."""


def clone(tensors: Mapping[str, Tensor]) -> Tensors:
    """A copy that shares no memory with the original."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def contiguous(tensors: Mapping[str, Tensor]) -> Tensors:
    """The same values in the standard memory order.

    Reductions add in memory order, and a tensor that was saved and read back has the standard one. State that has
    this order in memory too gives the same bits whether or not a run was interrupted.
    """
    return {name: value.contiguous() for name, value in tensors.items()}


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """How many bytes the tensors take on the wire."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def flatten(nested: Mapping[str, Mapping[str, Tensor]]) -> Tensors:
    """Join the names of component and tensor.

    Example:
        >>> sorted(flatten({"anchors": {"anchors": torch.zeros(1)}, "model": {"fc.bias": torch.zeros(1)}}))
        ['anchors/anchors', 'model/fc.bias']
    """
    return {f"{component}/{name}": value for component, tensors in nested.items() for name, value in tensors.items()}


def unflatten(flat: Mapping[str, Tensor]) -> ComponentTensors:
    """The inverse of :func:`flatten` (components without tensors do not come back)."""
    nested: ComponentTensors = {}
    for path, value in flat.items():
        component, name = path.split("/", 1)
        nested.setdefault(component, {})[name] = value
    return nested


def first_non_finite(tensors: Mapping[NameT, Tensor]) -> NameT | None:
    """The name of the first tensor that holds a NaN or an infinity, if there is one."""
    floating = [value for value in tensors.values() if value.is_floating_point() and value.numel()]
    if not floating:
        return None
    if len(floating) > 1 and sum(value.numel() for value in floating) <= _FEW:
        norms: Sequence[Tensor] = [torch.cat([value.flatten() for value in floating]).abs().max()]
    else:
        norms = torch._foreach_norm(floating, torch.inf)
    # The largest absolute value is finite unless an element is not: one pass, no mask.
    if all(map(math.isfinite, torch.stack(tuple(norms)).tolist())):
        return None
    return next(n for n, value in tensors.items() if value.is_floating_point() and not torch.isfinite(value).all())
