"""Fixed-point numbers: contributions as whole multiples of 2⁻²⁴, so that their sum is exact and of integers.

Every value is rounded to the nearest multiple (ties to even). A sum over a cohort stays below 2²⁹ in absolute value, so
it is a whole number below 2⁵³ in units of 2⁻²⁴: exact in double precision, in every order of addition, and far from
overflow in the 64-bit integers that are masked. A contribution with a larger value is refused on the client, where it
can be named. Below noise that clients add, values are rounded towards zero instead, so that no norm grows beyond the
clip. The simulator runs the same component without masks and obtains the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedfa.errors import AlgorithmError
from fedfa.learning.aggregate import Contribution, WeightedSum, flatten_contribution, unflatten_contribution
from fedfa.learning.component import Protection
from fedfa.learning.context import ClientContext, Role, Task
from fedfa.learning.tensors import Tensors

FRACTION_BITS = 24
TOTAL_BITS = 53
"""Bits of the largest sum, including the fraction."""
SMALLEST = 3
"""Smallest number of clients in a sum: of two, each would know the other's contribution."""


class FixedPoint(Protection):
    """Rounds everything that leaves a client to fixed point."""

    name = "encoding"

    clients: int = Field(1, ge=1)
    """Largest number of clients that are summed."""
    towards_zero: bool = False
    """Round towards zero."""

    @property
    def largest(self) -> float:
        """Largest absolute value of a client."""
        return float(2 ** (TOTAL_BITS - FRACTION_BITS) // self.clients)

    def init(self, task: Task, rng: np.random.Generator) -> Tensors:
        """No state. Tensors that clients keep are refused: somebody would have to tell how good they are."""
        if kept := [name for name, role in task.roles.items() if role is Role.LOCAL]:
            raise AlgorithmError(
                f"privacy.masks = true cannot be used where clients keep tensors ({kept[0]!r} …): the accuracy that is "
                "reported would be that of single clients' own models; share the whole model"
            )
        return {}

    def protect(self, ctx: ClientContext, contribution: Contribution) -> Contribution:
        """The contribution in double precision, in multiples of 2⁻²⁴."""
        return {
            group: WeightedSum(
                {name: self._rounded(f"{group}:{name}", value) for name, value in entry.tensors.items()},
                self._rounded(f"the weight of {group}", entry.weight),
            )
            for group, entry in contribution.items()
        }

    def _rounded(self, what: str, value: Tensor) -> Tensor:
        if value.numel() and not float(value.abs().max()) <= self.largest:
            raise AlgorithmError(
                f"secure sums: {what} holds {float(value.abs().max()):g}, more than the {self.largest:g} that a sum "
                f"over {self.clients} clients has room for; lower local.lr, or use fewer samples per client"
            )
        units = value.double() * 2.0**FRACTION_BITS
        return (units.trunc() if self.towards_zero else units.round()) * 2.0**-FRACTION_BITS


@dataclass(frozen=True)
class Layout:
    """Names and shapes of everything in a contribution, in the order of the vector that is masked."""

    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, contribution: Contribution) -> Layout:
        """The layout of a contribution."""
        flat = flatten_contribution(contribution)
        return cls({name: tuple(flat[name].shape) for name in sorted(flat)})

    @property
    def length(self) -> int:
        """Numbers in the vector."""
        return sum(int(np.prod(shape, dtype=np.int64)) for shape in self.shapes.values())

    def to_vector(self, contribution: Contribution) -> np.ndarray:
        """A rounded contribution as integers modulo 2⁶⁴; what it lacks is zero.

        Raises:
            AlgorithmError: It holds something that the layout does not have.
        """
        flat = flatten_contribution(contribution)
        if unknown := flat.keys() - self.shapes.keys():
            raise AlgorithmError(f"secure sums: the server did not expect {sorted(unknown)[0]!r}")
        parts = []
        for name, shape in self.shapes.items():
            value = flat[name].double() if name in flat else torch.zeros(shape, dtype=torch.float64)
            if tuple(value.shape) != shape:
                raise AlgorithmError(f"secure sums: {name!r} has shape {list(value.shape)}, not {list(shape)}")
            parts.append((value * 2.0**FRACTION_BITS).flatten().cpu().numpy().astype(np.int64))
        return np.concatenate(parts).view(np.uint64) if parts else np.zeros(0, np.uint64)

    def to_contribution(self, vector: np.ndarray) -> Contribution:
        """The inverse of :meth:`to_vector`, for a vector or a sum of vectors."""
        values = torch.from_numpy(vector.view(np.int64).astype(np.float64) * 2.0**-FRACTION_BITS)
        flat: Tensors = {}
        first = 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape, dtype=np.int64))
            flat[name] = values[first : first + size].reshape(shape).clone()
            first += size
        return unflatten_contribution(flat)
