"""Augmentation: random changes of training batches, drawn on the client for every batch. Test data stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfa.trees import NetworkInput

Augmentation = Callable[[NetworkInput, np.random.Generator], NetworkInput]
"""From a batch as the network reads it, and the client's random stream of the round, to the batch to train on."""


@dataclass(frozen=True, eq=False)
class CropAndFlip:
    """The usual augmentation for CIFAR: a random crop of the padded image, and a flip from left to right.

    Attributes:
        blank: A black image as the network reads it, ``[1, C, H, W]``: the value of the padding.
        padding: Pixels added on each side.
    """

    blank: Tensor
    padding: int = 4

    def __call__(self, images: NetworkInput, rng: np.random.Generator) -> NetworkInput:
        """Augment images ``[B, C, H, W]``."""
        count, _, height, width = images.shape
        pad, device = self.padding, images.device
        offsets = torch.from_numpy(rng.integers(0, 2 * pad + 1, (2, count))).to(device)
        flip = torch.from_numpy(rng.random(count) < 0.5).to(device)
        padded = self.blank.to(device)[:, :, :1, :1].repeat(count, 1, height + 2 * pad, width + 2 * pad)
        padded[:, :, pad : pad + height, pad : pad + width] = images
        rows = offsets[0, :, None] + torch.arange(height, device=device)
        columns = torch.arange(width, device=device).expand(count, width)
        columns = offsets[1, :, None] + torch.where(flip[:, None], width - 1 - columns, columns)
        samples = torch.arange(count, device=device)[:, None, None]
        cropped = padded.permute(0, 2, 3, 1)[samples, rows[:, :, None], columns[:, None, :]]
        return cropped.permute(0, 3, 1, 2)


AUGMENTATIONS = ("none", "crop-flip")
"""Augmentations by name."""
