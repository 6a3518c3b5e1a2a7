"""Input preparation at prediction time: what a saved model must know about the data that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedfa.data.normalise import Normalisation
from fedfa.data.raw import Array, to_numpy
from fedfa.errors import DataError

InputKind = Literal["uint8", "float32"]


@dataclass(frozen=True)
class Preprocessing:
    """Converts raw inputs to what the network reads, exactly as in training.

    Attributes:
        normalisation: Constants that inputs are normalised with.
        input_shape: Shape of one input as the network reads it: ``(C, H, W)`` for images.
        kind: ``"uint8"`` for images of bytes, ``"float32"`` for any other numbers.
        classes: Names of the classes; output ``i`` is ``classes[i]``.

    Example:
        >>> images = Preprocessing(Normalisation((0.5,), (0.5,)), (1, 1, 2), "uint8", ("cat", "dog"))
        >>> images.apply(np.array([[0, 255]], dtype=np.uint8)).tolist()
        [[[[-1.0, 1.0]]]]
    """

    normalisation: Normalisation
    input_shape: tuple[int, ...]
    kind: InputKind
    classes: tuple[str, ...]

    def apply(self, inputs: Any) -> Tensor:
        """Prepare inputs for the network.

        Args:
            inputs: An array or tensor. Images are ``uint8 [N, H, W, C]``, ``[N, C, H, W]`` or, with one channel,
                ``[N, H, W]``; other inputs are numbers ``[N, …]``. A single input without ``N`` is a batch of one.

        Raises:
            DataError: The type or the shape is not that of the training data.
        """
        values = to_numpy(inputs)
        batch = self._images(values) if self.kind == "uint8" else self._numbers(values)
        # A copy: the caller's array may be read-only or have negative strides, which torch does not take.
        return self.normalisation.batch(torch.from_numpy(np.array(batch, order="C")))

    def _images(self, values: Array) -> Array:
        if values.dtype != np.uint8:
            raise DataError(
                f"the inputs are {values.dtype}, but the model was trained on uint8 images: pass uint8 values 0..255, "
                "without scaling or normalising them (values in [0, 1]: multiply by 255, round, convert to uint8)"
            )
        channels, height, width = self.input_shape
        if channels == 1 and (height, width) in (values.shape, values.shape[1:]):
            values = values[..., None]
        batch = values[None] if values.ndim == 3 else values
        if batch.shape[1:] == (height, width, channels):
            return batch
        if batch.shape[1:] == self.input_shape:
            return batch.transpose(0, 2, 3, 1)
        grey = f", [N, {height}, {width}]" if channels == 1 else ""
        raise DataError(
            f"the images have shape {list(values.shape)}; expected [N, {height}, {width}, {channels}]{grey} or "
            "a single image"
        )

    def _numbers(self, values: Array) -> Array:
        if values.dtype.kind not in "fiub" or (values.dtype == np.uint8 and len(self.input_shape) in (2, 3)):
            raise DataError(
                f"the inputs are {values.dtype}, but the model was trained on float32 numbers: pass floating-point "
                "values in the scale of the training data"
            )
        batch = values[None] if values.shape == self.input_shape else values
        if batch.shape[1:] != self.input_shape:
            expected = ", ".join(["N", *map(str, self.input_shape)])
            raise DataError(f"the inputs have shape {list(values.shape)}; expected [{expected}] or a single input")
        return batch.astype(np.float32)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` restores them exactly."""
        return {
            "kind": self.kind,
            "input_shape": list(self.input_shape),
            "classes": list(self.classes),
            "normalisation": self.normalisation.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Inverse of :meth:`to_dict`.

        Raises:
            DataError: A value is missing or unknown.
        """
        try:
            if values["kind"] not in get_args(InputKind):
                raise DataError(f"preprocessing: unknown kind of input {values['kind']!r}; expected uint8 or float32")
            return cls(
                Normalisation.from_dict(values["normalisation"]),
                tuple(values["input_shape"]),
                values["kind"],
                tuple(values["classes"]),
            )
        except KeyError as error:
            raise DataError(f"preprocessing: the value {error} is missing") from None
