"""Input preparation in training and at prediction time: normalisation, and what a saved model must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedfa.data.raw import Array, to_numpy
from fedfa.errors import DataError


@dataclass(frozen=True)
class Normalisation:
    """Per-channel mean and standard deviation, in units of [0, 1] for images.

    Empty tuples switch it off: images are then only scaled to [0, 1], other data stay as they are.

    Example:
        >>> Normalisation((0.5,), (0.5,)).batch(torch.tensor([[[[0], [255]]]], dtype=torch.uint8)).flatten().tolist()
        [-1.0, 1.0]
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise DataError(f"normalisation has {len(self.mean)} means but {len(self.std)} standard deviations")
        if any(not s > 0 for s in self.std):
            raise DataError(f"normalisation needs positive standard deviations, not {self.std}")

    def to_dict(self) -> dict[str, list[float]]:
        """Plain JSON values; :meth:`from_dict` restores them exactly."""
        return {"mean": [float(mean) for mean in self.mean], "std": [float(std) for std in self.std]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Normalisation:
        """Inverse of :meth:`to_dict`."""
        return cls(tuple(values["mean"]), tuple(values["std"]))

    def batch(self, inputs: Tensor) -> Tensor:
        """Convert a batch to network input.

        Args:
            inputs: ``uint8`` images ``[B, H, W, C]``, or ``float32`` of any shape ``[B, …]``.

        Returns:
            Images as ``float32 [B, C, H, W]`` with channels-last strides (no transposed copy is made);
            other data in their own shape, normalised along dimension 1 where a mean is set.
        """
        if inputs.dtype == torch.uint8:
            # The permuted view keeps NHWC memory order, which is torch's channels-last: convolutions need no copy.
            pixels = inputs.permute(0, 3, 1, 2).to(torch.float32)
            if not self.mean:
                return pixels.mul_(1 / 255)
            scale, shift = _scale_and_shift(self, inputs.shape[1:], inputs.device)
            return pixels.mul_(scale).add_(shift)
        if not self.mean:
            return inputs
        along = (1, -1) + (1,) * (inputs.dim() - 2)
        mean, std = (inputs.new_tensor(values).view(along) for values in (self.mean, self.std))
        return (inputs - mean) / std


@lru_cache(maxsize=64)
def _scale_and_shift(of: Normalisation, image: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """``x/255`` followed by ``(x - mean) / std`` as one scale and one shift.

    Both are expanded to a whole image: with the channels innermost, broadcasting one number per channel runs in inner
    loops of three elements and takes ten times as long.
    """
    if len(of.mean) not in (1, image[-1]):
        raise DataError(f"normalisation has {len(of.mean)} channels, but the images have {image[-1]}")
    means, stds = torch.tensor(of.mean, dtype=torch.float64), torch.tensor(of.std, dtype=torch.float64)

    def whole_image(values: Tensor) -> Tensor:
        pixels = values.to(torch.float32).expand(1, *image).contiguous()
        return pixels.permute(0, 3, 1, 2).to(device)

    return whole_image(1 / (255 * stds)), whole_image(-means / stds)


#: Constants of the reference code (the FedFA authors'), where they differ from the data set's own statistics.
_AUTHORS: Mapping[str, Normalisation] = {
    "fashion-mnist": Normalisation((0.1307,), (0.3081,)),  # MNIST's constants, as in their notebooks
    "cifar10": Normalisation((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
}

#: Named normalisations: constants by data set. Data sets that are not listed use their own statistics.
NORMALISATIONS: Mapping[str, Mapping[str, Normalisation]] = {"dataset": {}, "authors": _AUTHORS}


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
