"""Normal noise: from a run's seed in simulations, from the operating system in real federations.

Simulated noise can be reproduced by whoever knows the seed, and therefore protects nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Draw = Callable[[Sequence[int]], Tensor]
"""Standard normal numbers of a shape, in double precision."""


def simulated(rng: np.random.Generator) -> Draw:
    """Noise of a random stream."""
    return lambda shape: torch.from_numpy(np.asarray(rng.standard_normal(tuple(shape))))


def from_system(shape: Sequence[int]) -> Tensor:
    """Noise of the operating system's generator, by the Box–Muller transform."""
    count = int(np.prod(tuple(shape), dtype=np.int64))
    bits = np.frombuffer(os.urandom(16 * count), dtype="<u8").reshape(2, count) >> 11  # 53 bits each
    radius = np.sqrt(-2 * np.log((bits[0] + 1.0) / 2**53))  # of a number in (0, 1]
    return torch.from_numpy((radius * np.cos(2 * np.pi * bits[1] / 2**53)).reshape(tuple(shape)))
