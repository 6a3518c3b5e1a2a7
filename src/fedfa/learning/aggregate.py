"""What clients return: weighted sums and the weights to divide them by, never means.

Sums can be added in any grouping, so a server that can only add is enough: results stream through it in constant
memory, and secure sums or noise go on top without touching a method. Only rules that compare single updates (robust
aggregation) ask the :class:`Total` to keep them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from fedfa.learning.tensors import Tensors, nbytes


@dataclass(frozen=True)
class WeightedSum:
    """Named sums ``Σ weight · value`` that share one weight ``Σ weight``.

    The weight is a scalar, or has one entry per row of the tensors (e.g. one per class, shape ``[C, 1]``).
    """

    tensors: Tensors
    weight: Tensor

    @classmethod
    def of(cls, values: Mapping[str, Tensor], weight: float | Tensor) -> WeightedSum:
        """One client's contribution of ``values`` with this weight.

        Example:
            >>> WeightedSum.of({"a": torch.tensor([1.0, 2.0])}, 3).tensors["a"]
            tensor([3., 6.])
        """
        weight = torch.as_tensor(weight, dtype=torch.float32)
        usual = all(value.dtype is torch.float32 and value.is_contiguous() for value in values.values())
        if weight.dim() == 0 and usual and values:  # all at once, by the same arithmetic
            return cls(dict(zip(values, torch._foreach_mul(list(values.values()), weight), strict=True)), weight)
        weighted = {}
        for name, value in values.items():
            # Counters are averaged like the rest; widened in the main memory, because not every device has doubles.
            floating = value if value.is_floating_point() else value.cpu().double()
            if floating.dtype in (torch.float16, torch.bfloat16):  # a weighted sum would leave their range
                floating = floating.float()
            # Contiguous, whatever strides the network trains with: reductions over what was sent must not depend on
            # whether it went through a file or a network.
            weighted[name] = (floating * weight.to(floating)).contiguous()
        return cls(weighted, weight)

    def cpu(self) -> WeightedSum:
        """The same sums in the main memory."""
        return WeightedSum({name: value.cpu() for name, value in self.tensors.items()}, self.weight.cpu())


Contribution: TypeAlias = dict[str, WeightedSum]
"""Everything one client (or several, added up) returns, by ``component/group``."""


def contribution_nbytes(contribution: Contribution) -> int:
    """Size of a contribution on the wire."""
    return sum(nbytes(group.tensors) + nbytes({"weight": group.weight}) for group in contribution.values())


def flatten_contribution(contribution: Contribution) -> Tensors:
    """A contribution as plain named tensors: ``component/group:name`` and ``component/group#weight``."""
    flat: Tensors = {}
    for group, entry in contribution.items():
        flat[f"{group}#weight"] = entry.weight
        flat.update({f"{group}:{name}": value for name, value in entry.tensors.items()})
    return flat


def unflatten_contribution(flat: Mapping[str, Tensor]) -> Contribution:
    """The inverse of :func:`flatten_contribution`."""
    # The name of a group never holds ':' (components may not be named so); that of a tensor may hold anything.
    weights = {path: value for path, value in flat.items() if ":" not in path}
    contribution = {path.removesuffix("#weight"): WeightedSum({}, value) for path, value in weights.items()}
    for path, value in flat.items():
        if path not in weights:
            group, name = path.split(":", 1)
            contribution[group].tensors[name] = value
    return contribution


@dataclass
class Aggregate:
    """The running aggregate of a cohort, in double precision.

    Args:
        keep_each: Also keep every client's contribution, for rules that compare them (costs memory per client).
    """

    keep_each: bool = False
    clients: int = 0
    each: list[Contribution] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    """The clients that were added, in order."""
    _sums: Contribution = field(default_factory=dict)

    def add(self, contribution: Contribution, client: int = -1) -> None:
        """Add the contribution of one client."""
        self.clients += 1
        self.members.append(client)
        if self.keep_each:
            self.each.append(contribution)
        for group, entry in contribution.items():
            if group not in self._sums:
                self._sums[group] = WeightedSum(
                    {name: value.to(torch.float64, copy=True) for name, value in entry.tensors.items()},
                    entry.weight.to(torch.float64, copy=True),
                )
                continue
            mine = self._sums[group]
            mine.weight.add_(entry.weight)
            if entry.tensors:
                torch._foreach_add_([mine.tensors[name] for name in entry.tensors], list(entry.tensors.values()))

    def with_sums(self, sums: Contribution, clients: int | None = None) -> Aggregate:
        """The aggregate of the same clients with other sums, e.g. robust or noisy ones; without single contributions.

        Args:
            sums: In double precision.
            clients: The number of clients to report instead.
        """
        return Aggregate(False, self.clients if clients is None else clients, [], self.members, sums)

    @property
    def groups(self) -> list[str]:
        """Names of the groups that at least one client contributed to."""
        return list(self._sums)

    def __contains__(self, group: str) -> bool:
        return group in self._sums

    def __getitem__(self, group: str) -> WeightedSum:
        return self._sums[group]

    def mean(self, group: str) -> Tensors:
        """``Σ weight · value / Σ weight`` in double precision; rows whose weight is zero come out as zero."""
        entry = self._sums[group]
        divisor = torch.where(entry.weight == 0, 1.0, entry.weight)
        return {name: value / divisor for name, value in entry.tensors.items()}
