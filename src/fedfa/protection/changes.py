"""Contributions as changes: the mean of each group, relative to the state that the client received where it is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedfa.learning.aggregate import WeightedSum
from fedfa.learning.component import Component
from fedfa.learning.tensors import ComponentTensors, Tensors


def state_groups(components: Sequence[Component]) -> dict[str, str]:
    """The groups that become a component's state, each with the name of that component."""
    return {f"{one.name}/{group}": one.name for one in components for group in one.traits.class_states}


def received(group: str, states: Mapping[str, str], broadcast: ComponentTensors) -> Tensors:
    """What the values of a group are relative to, by tensor; nothing for a group whose values are changes already."""
    return broadcast.get(states[group], {}) if group in states else {}


def changes_of(entry: WeightedSum, reference: Mapping[str, torch.Tensor]) -> Tensors:
    """Means minus reference in double precision; zero in rows without weight.

    Example:
        >>> entry = WeightedSum.of({"a": torch.tensor([[1.0], [2.0]])}, torch.tensor([[4.0], [0.0]]))
        >>> changes_of(entry, {"a": torch.tensor([[0.5], [0.5]])})["a"].flatten()
        tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    held = entry.weight.double() != 0
    divisor = torch.where(held, entry.weight.double(), 1.0)
    found = {}
    for name, value in entry.tensors.items():
        change = value.double() / divisor
        if name in reference:
            change = change - reference[name].to(change)
        found[name] = torch.where(held, change, 0.0)
    return found


def with_changes(entry: WeightedSum, changes: Tensors, reference: Mapping[str, torch.Tensor]) -> WeightedSum:
    """The contribution with the same weight whose :func:`changes_of` are these."""
    weight, sums = entry.weight.double(), {}
    for name, value in entry.tensors.items():
        mean = changes[name] + (reference[name].to(changes[name]) if name in reference else 0.0)
        sums[name] = (mean * weight).to(value.dtype)
    return WeightedSum(sums, entry.weight)
