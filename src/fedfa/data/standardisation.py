"""Standardisation of float inputs: mean 0 and standard deviation 1, fitted on training samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedfa.data.partitions.assignment import IntArray
from fedfa.data.preprocessing import Normalisation
from fedfa.data.records import Field, Records
from fedfa.errors import DataError

Standardise = Literal["none", "federation", "client"]


def fit(inputs: Tensor, positions: IntArray, normalisation: Normalisation) -> Normalisation:
    """The normalisation that standardises the samples at some positions.

    A column that is constant there is only shifted.

    Args:
        inputs: All training inputs as stored.
        positions: The samples to fit on.
        normalisation: How the inputs are prepared otherwise.

    Raises:
        DataError: There is nothing to standardise: images are normalised already, integers are no quantities.
    """
    if isinstance(normalisation, Records):
        stored = normalisation.unpack(inputs[torch.from_numpy(positions)])
        fields = [
            Field(one.name, one.dtype, one.shape, _constants(values) if one.dtype == "float32" else one.normalisation)
            for one, values in zip(normalisation.fields, stored.values(), strict=True)
        ]
        if all(one.dtype != "float32" for one in normalisation.fields):
            raise DataError("standardise: none of the inputs' arrays holds float numbers")
        return replace(normalisation, fields=tuple(fields))
    if inputs.dtype != torch.float32:
        kind = "integers" if inputs.dtype == torch.int64 else "images, which are normalised already (data.normalise)"
        raise DataError(f"standardise is for tables and other float inputs; these are {kind}")
    return _constants(inputs[torch.from_numpy(positions)])


def _constants(values: Tensor) -> Normalisation:
    """Mean and deviation along dimension 1, in double precision; of single numbers, over all."""
    numbers = values.numpy().astype(np.float64)
    if numbers.ndim < 2:
        numbers = numbers[:, None]
    others = tuple(axis for axis in range(numbers.ndim) if axis != 1)
    mean = numbers.mean(axis=others)
    deviation = numbers.std(axis=others)
    constant = deviation <= 1e-7 * np.maximum(np.abs(mean), 1e-30)  # rounding errors of the mean are no spread
    deviation = np.where(constant, 1.0, deviation)
    return Normalisation(tuple(mean.tolist()), tuple(deviation.tolist()))
