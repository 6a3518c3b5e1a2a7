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
from fedfa.trees import NetworkInput


@dataclass(frozen=True)
class Normalisation:
    """Per-channel mean and standard deviation, in units of [0, 1] for images.

    Empty tuples switch it off: images are then only scaled to [0, 1], other data stay as they are. Integers that are no
    images (tokens) are never changed.

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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` restores them exactly."""
        return {"mean": [float(mean) for mean in self.mean], "std": [float(std) for std in self.std]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Normalisation:
        """Inverse of :meth:`to_dict`, for inputs of several tensors too."""
        if "fields" in values:
            from fedfa.data.records import Records  # imports this module

            return Records.from_dict(values)
        return Normalisation(tuple(values["mean"]), tuple(values["std"]))

    def numbers(self) -> tuple[float, ...]:
        """All its constants."""
        return (*self.mean, *self.std)

    def batch(self, inputs: Tensor) -> NetworkInput:
        """Convert a batch to network input.

        Args:
            inputs: Images ``[B, H, W, C]`` of 8 or 16 bits, or ``float32`` or ``int64`` of any shape ``[B, …]``.

        Returns:
            Images as ``float32 [B, C, H, W]`` with channels-last strides (no transposed copy is made);
            other data in their own shape, normalised along dimension 1 where a mean is set.
        """
        if inputs.dtype in PEAKS and inputs.dim() == 4:
            peak = PEAKS[inputs.dtype]
            # The permuted view keeps NHWC memory order, which is torch's channels-last: convolutions need no copy.
            pixels = inputs.permute(0, 3, 1, 2).to(torch.float32)
            if not self.mean:
                return pixels.mul_(1 / peak)
            scale, shift = _scale_and_shift(self, peak, inputs.shape[1:], inputs.device)
            return pixels.mul_(scale).add_(shift)
        if not self.mean:
            return inputs
        along = (1, -1) + (1,) * (inputs.dim() - 2) if inputs.dim() > 1 else (-1,)
        mean, std = (inputs.new_tensor(values).view(along) for values in (self.mean, self.std))
        return (inputs - mean) / std


PEAKS = {torch.uint8: 255, torch.uint16: 65535}
"""The types of images, with their largest value."""


@lru_cache(maxsize=64)
def _scale_and_shift(of: Normalisation, peak: int, image: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """``x/peak`` followed by ``(x - mean) / std`` as one scale and one shift.

    Both are expanded to a whole image: with the channels innermost, broadcasting one number per channel runs in inner
    loops of three elements and takes ten times as long.
    """
    if len(of.mean) not in (1, image[-1]):
        raise DataError(f"normalisation has {len(of.mean)} channels, but the images have {image[-1]}")
    means, stds = torch.tensor(of.mean, dtype=torch.float64), torch.tensor(of.std, dtype=torch.float64)

    def whole_image(values: Tensor) -> Tensor:
        pixels = values.to(torch.float32).expand(1, *image).contiguous()
        return pixels.permute(0, 3, 1, 2).to(device)

    return whole_image(1 / (peak * stds)), whole_image(-means / stds)


#: Constants of the reference code (the FedFA authors'), where they differ from the data set's own statistics.
_AUTHORS: Mapping[str, Normalisation] = {
    "fashion-mnist": Normalisation((0.1307,), (0.3081,)),  # MNIST's constants, as in their notebooks
    "cifar10": Normalisation((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
}

#: Named normalisations: constants by data set. Data sets that are not listed use their own statistics.
NORMALISATIONS: Mapping[str, Mapping[str, Normalisation]] = {"dataset": {}, "authors": _AUTHORS}


InputKind = Literal["uint8", "uint16", "float32", "int64", "record"]
"""Images of 8 and 16 bits, other numbers, integers such as tokens, and inputs of several tensors."""


@dataclass(frozen=True)
class Preprocessing:
    """Converts raw inputs to what the network reads, exactly as in training.

    Attributes:
        normalisation: Constants that inputs are normalised with.
        input_shape: Shape of one input as the network reads it: ``(C, H, W)`` for images.
        kind: ``"uint8"`` and ``"uint16"`` for images, ``"int64"`` for integers such as tokens, ``"float32"`` for any
            other numbers, ``"record"`` for inputs of several tensors.
        classes: Names of the classes; output ``i`` is ``classes[i]``.
        clients: The constants of each client, where clients standardise with their own.

    Example:
        >>> images = Preprocessing(Normalisation((0.5,), (0.5,)), (1, 1, 2), "uint8", ("cat", "dog"))
        >>> images.apply(np.array([[0, 255]], dtype=np.uint8)).tolist()
        [[[[-1.0, 1.0]]]]
    """

    normalisation: Normalisation
    input_shape: tuple[int, ...]
    kind: InputKind
    classes: tuple[str, ...]
    clients: tuple[Normalisation, ...] = ()

    def apply(self, inputs: Any, client: int | None = None) -> NetworkInput:
        """Prepare inputs for the network.

        Args:
            inputs: An array or tensor. Images are ``[N, H, W, C]``, ``[N, C, H, W]`` or, with one channel,
                ``[N, H, W]``; other inputs are numbers ``[N, …]``. A single input without ``N`` is a batch of one.
                A dictionary or tuple of such arrays, where the training data were given so.
            client: Whose constants to use, where clients standardise with their own.

        Raises:
            DataError: The type or the shape is not that of the training data, or a value is not finite.
        """
        normalisation = self.clients[client] if client is not None and self.clients else self.normalisation
        if self.kind == "record":
            return _apply_to_each(normalisation, inputs)
        if isinstance(inputs, Mapping):
            raise DataError(f"the inputs are a {type(inputs).__name__}; the model was trained on one array: pass that")
        try:
            values = to_numpy(inputs)
        except (ValueError, TypeError) as error:  # NumPy: lists of different lengths
            raise DataError(f"the inputs cannot be read as an array: {error}") from None
        batch = self._images(values) if self.kind in ("uint8", "uint16") else self._numbers(values)
        # A copy: the caller's array may be read-only or have negative strides, which torch does not take.
        return normalisation.batch(torch.from_numpy(np.array(batch, order="C")))

    def example(self) -> NetworkInput:
        """Two inputs of zeros, as the network reads them."""
        if self.kind == "record":
            from fedfa.data.records import Records  # imports this module

            assert isinstance(self.normalisation, Records)
            width = sum(one.nbytes for one in self.normalisation.fields)
            return self.normalisation.batch(torch.zeros(2, width, dtype=torch.int8))
        return torch.zeros(2, *self.input_shape, dtype=torch.int64 if self.kind == "int64" else torch.float32)

    def _images(self, values: Array) -> Array:
        if values.dtype != np.dtype(self.kind):
            scale = np.iinfo(self.kind).max
            raise DataError(
                f"the inputs are {values.dtype}, but the model was trained on {self.kind} images: pass {self.kind} "
                f"values 0..{scale}, without scaling or normalising them (values in [0, 1]: multiply by {scale}, "
                f"round, convert to {self.kind})"
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
        if self.kind == "int64" and values.dtype.kind not in "iu":
            raise DataError(f"the inputs are {values.dtype}, but the model was trained on integers: pass integers")
        if values.dtype.kind not in "fiub" or (values.dtype == np.uint8 and len(self.input_shape) in (2, 3)):
            raise DataError(
                f"the inputs are {values.dtype}, but the model was trained on float32 numbers: pass floating-point "
                "values in the scale of the training data"
            )
        batch = values[None] if values.shape == self.input_shape else values
        if batch.shape[1:] != self.input_shape:
            expected = ", ".join(["N", *map(str, self.input_shape)])
            raise DataError(f"the inputs have shape {list(values.shape)}; expected [{expected}] or a single input")
        if not np.isfinite(batch).all():
            raise DataError("the inputs hold NaN or infinite values: replace or remove them")
        return batch.astype(np.int64 if self.kind == "int64" else np.float32)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` restores them exactly."""
        return {
            "kind": self.kind,
            "input_shape": list(self.input_shape),
            "classes": list(self.classes),
            "normalisation": self.normalisation.to_dict(),
            **({"clients": [one.to_dict() for one in self.clients]} if self.clients else {}),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Inverse of :meth:`to_dict`.

        Raises:
            DataError: A value is missing or unknown.
        """
        try:
            if values["kind"] not in get_args(InputKind):
                kinds = ", ".join(get_args(InputKind))
                raise DataError(f"preprocessing: unknown kind of input {values['kind']!r}; expected {kinds}")
            return cls(
                Normalisation.from_dict(values["normalisation"]),
                tuple(values["input_shape"]),
                values["kind"],
                tuple(values["classes"]),
                tuple(Normalisation.from_dict(one) for one in values.get("clients", ())),
            )
        except KeyError as error:
            raise DataError(f"preprocessing: the value {error} is missing") from None


def _apply_to_each(layout: Normalisation, inputs: Any) -> NetworkInput:
    """Prepare a dictionary or tuple of arrays."""
    from fedfa.data.records import Records  # imports this module

    assert isinstance(layout, Records)
    names = [one.name for one in layout.fields]
    if layout.named:
        if not isinstance(inputs, Mapping) or set(inputs) != set(names):
            found = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
            raise DataError(f"the model reads a dictionary of {', '.join(names)}, not {found}")
        given = [inputs[name] for name in names]
    else:
        if not isinstance(inputs, tuple | list) or len(inputs) != len(names):
            raise DataError(f"the model reads a tuple of {len(names)} arrays, not {type(inputs).__name__}")
        given = list(inputs)
    made = []
    for one, values in zip(layout.fields, given, strict=True):
        prepared = Preprocessing(one.normalisation, one.input_shape, one.kind, ()).apply(values)
        made.append(prepared.bool() if one.dtype == "bool" else prepared)
    if len({len(values) for values in made}) > 1:
        raise DataError(f"the arrays have different numbers of samples: {', '.join(str(len(one)) for one in made)}")
    return dict(zip(names, made, strict=True)) if layout.named else tuple(made)
