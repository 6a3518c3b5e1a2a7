"""Normalisation of batches: stored bytes to network input in one cast, one multiplication and one addition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

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


def named_normalisation(name: str, dataset: str, statistics: Normalisation) -> Normalisation:
    """Constants of a named normalisation for a data set.

    Args:
        name: A key of :data:`NORMALISATIONS`.
        dataset: Name of the data set.
        statistics: The data set's own statistics, the default.
    """
    if name not in NORMALISATIONS:
        raise DataError(f"unknown normalisation {name!r}; choose one of {', '.join(NORMALISATIONS)}")
    return NORMALISATIONS[name].get(dataset, statistics)
