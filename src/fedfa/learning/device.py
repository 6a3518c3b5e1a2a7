"""The one place that chooses where to compute."""

from __future__ import annotations

from typing import Literal

import torch

from fedfa.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda", "mps"]


def choose_device(name: DeviceName) -> torch.device:
    """The device for a setting; ``auto`` takes CUDA, then MPS, then the CPU.

    Raises:
        ConfigError: The device asked for is not there.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    if not available[name]:
        there = ", ".join(kind for kind, is_there in available.items() if is_there)
        raise ConfigError(f'device = "{name}", but this machine has only: {there}; use "auto"')
    return torch.device(name)
