"""Inputs of several tensors (tokens with a mask, a picture with a table), stored as one row of bytes per sample.

Everything that handles raw inputs (cache, checksums, selection, hold-out) then works on one array; the batch that the
network reads is a dictionary or tuple of tensors again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedfa.data.preprocessing import InputKind, Normalisation
from fedfa.data.raw import Array
from fedfa.errors import DataError
from fedfa.trees import NetworkInput

_TORCH = {"uint8": torch.uint8, "uint16": torch.uint16, "float32": torch.float32, "int64": torch.int64}
_TORCH["bool"] = torch.bool


@dataclass(frozen=True)
class Field:
    """One tensor of a record.

    Attributes:
        name: Name of the network's keyword argument; empty in a tuple.
        dtype: Type of its numbers as stored.
        shape: Shape of one sample as stored.
        normalisation: How it is prepared for the network.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    normalisation: Normalisation = field(default_factory=Normalisation)

    @property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def kind(self) -> InputKind:
        """Its kind as an input of its own."""
        is_picture = self.dtype in ("uint8", "uint16") and len(self.shape) == 3
        return cast(InputKind, self.dtype if is_picture or self.dtype == "int64" else "float32")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as the network reads it."""
        if self.kind in ("uint8", "uint16"):
            height, width, channels = self.shape
            return (channels, height, width)
        return self.shape


@dataclass(frozen=True)
class Records(Normalisation):
    """The layout of inputs that consist of several tensors, and how each is prepared."""

    fields: tuple[Field, ...] = ()
    named: bool = True
    """Whether a batch is a dictionary; otherwise it is a tuple."""

    def unpack(self, inputs: Tensor) -> dict[str, Tensor]:
        """The stored tensors of packed inputs ``int8 [B, bytes]``, by the field's name (its position in a tuple)."""
        found, start = {}, 0
        for position, one in enumerate(self.fields):
            cut = inputs[:, start : start + one.nbytes].clone(memory_format=torch.contiguous_format)
            stored = cut.view(_TORCH[one.dtype]) if one.nbytes else cut.to(_TORCH[one.dtype])
            found[one.name or str(position)] = stored.view(len(inputs), *one.shape)
            start += one.nbytes
        return found

    def numbers(self) -> tuple[float, ...]:
        """All constants of all fields."""
        return tuple(number for one in self.fields for number in one.normalisation.numbers())

    def batch(self, inputs: Tensor) -> NetworkInput:
        """See :meth:`Normalisation.batch`."""
        stored = self.unpack(inputs)
        made = [one.normalisation.batch(values) for one, values in zip(self.fields, stored.values(), strict=True)]
        return dict(zip(stored, made, strict=True)) if self.named else tuple(made)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`Normalisation.from_dict` restores them exactly."""
        fields = [
            {"name": f.name, "dtype": f.dtype, "shape": list(f.shape), "normalisation": f.normalisation.to_dict()}
            for f in self.fields
        ]
        return {"fields": fields, "named": self.named}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Records:
        """Inverse of :meth:`to_dict`."""
        fields = tuple(
            Field(one["name"], one["dtype"], tuple(one["shape"]), Normalisation.from_dict(one["normalisation"]))
            for one in values["fields"]
        )
        return cls(fields=fields, named=bool(values["named"]))


def pack(arrays: Sequence[Array], names: Sequence[str]) -> tuple[Array, Records]:
    """Arrays with a common first dimension as one row of bytes per sample, and their layout.

    Args:
        arrays: One for each tensor.
        names: Names of the network's keyword arguments; empty for a tuple.

    Raises:
        DataError: There is no array, or they have different numbers of samples.
    """
    if not arrays:
        raise DataError("the inputs are an empty dictionary or tuple; give at least one array")
    sizes = {len(values) for values in arrays}
    if len(sizes) > 1:
        listed = ", ".join(f"{name or position} {len(a):,}" for position, (name, a) in enumerate(_named(arrays, names)))
        raise DataError(f"the arrays of the inputs have different numbers of samples: {listed}")
    fields = [Field(name, str(values.dtype), values.shape[1:]) for name, values in _named(arrays, names)]
    rows = [np.ascontiguousarray(values).reshape(len(values), -1).view(np.int8) for values in arrays]
    return np.concatenate(rows, axis=1), Records(fields=tuple(fields), named=bool(names))


def unpacked(inputs: Array, layout: Records) -> dict[str, Array]:
    """The stored arrays of packed inputs by name."""
    return {name: values.numpy() for name, values in layout.unpack(torch.from_numpy(inputs)).items()}


def _named(arrays: Sequence[Array], names: Sequence[str]) -> list[tuple[str, Array]]:
    return list(zip(names or [""] * len(arrays), arrays, strict=True))
