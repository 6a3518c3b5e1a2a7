"""Noise: from a run's seed in simulations, from the operating system in real federations.

Simulated noise can be reproduced by whoever knows the seed, and therefore protects nobody.

The discrete Gaussian is sampled by the rejection of C. Canonne, G. Kamath, T. Steinke, *The Discrete Gaussian for
Differential Privacy*, NeurIPS 2020, for many numbers at once. Its coins are compared in double precision; none is below
1/e, so the probability of every number is right up to some 10⁻¹⁴ of itself, in the tails too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Draw = Callable[[Sequence[int]], Tensor]
"""Standard normal numbers of a shape, in double precision."""
Words = npt.NDArray[np.uint64]
Bits = Callable[[int], Words]
"""So many words of 64 random bits."""


def simulated(rng: np.random.Generator) -> Draw:
    """Noise of a random stream."""
    return lambda shape: torch.from_numpy(np.asarray(rng.standard_normal(tuple(shape))))


def from_system(shape: Sequence[int]) -> Tensor:
    """Noise of the operating system's generator, by the Box–Muller transform."""
    count = int(np.prod(tuple(shape), dtype=np.int64))
    bits = system_bits(2 * count).reshape(2, count) >> np.uint64(11)  # 53 bits each
    radius = np.sqrt(-2 * np.log((bits[0] + 1.0) / 2**53))  # of a number in (0, 1]
    return torch.from_numpy((radius * np.cos(2 * np.pi * bits[1] / 2**53)).reshape(tuple(shape)))


def simulated_bits(rng: np.random.Generator) -> Bits:
    """Bits of a random stream."""
    return lambda count: rng.integers(0, 2**64, count, dtype=np.uint64)


def system_bits(count: int) -> Words:
    """Bits of the operating system's generator."""
    return np.frombuffer(os.urandom(8 * count), dtype="<u8").astype(np.uint64)


def discrete_gaussian(deviation: float, count: int, bits: Bits) -> npt.NDArray[np.int64]:
    """Whole numbers x with probability proportional to exp(−x² / 2σ²).

    Args:
        deviation: σ, below 2⁴⁰.
        count: How many.
        bits: Where randomness comes from.

    Example:
        >>> rng = np.random.default_rng(1)
        >>> discrete_gaussian(1.5, 8, simulated_bits(rng)).tolist()
        [1, 2, 1, 0, 0, 0, 0, 0]
    """
    if not 0 < deviation < 2**40:
        raise ValueError(f"the deviation is {deviation}, not between 0 and 2⁴⁰")
    found: list[npt.NDArray[np.int64]] = []
    missing = count
    while missing > 0:
        found.append(_candidates(deviation, math.ceil(2.2 * missing) + 16, bits)[:missing])
        missing -= len(found[-1])
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _candidates(deviation: float, tries: int, bits: Bits) -> npt.NDArray[np.int64]:
    """What is left of so many tries: discrete Laplace numbers of scale t, thinned to the discrete Gaussian."""
    scale = math.floor(deviation) + 1
    below = bits(tries)
    below = below[below < np.uint64(2**64 // scale * scale)] if scale & (scale - 1) else below  # else some are likelier
    low = (below % np.uint64(scale)).astype(np.int64)
    low = low[_coins(low / scale, bits)]
    high, going = np.zeros(len(low), np.int64), np.arange(len(low))
    while len(going := going[_coins(np.ones(len(going)), bits)]):
        high[going] += 1
    size, negative = low + scale * high, (bits(len(low)) & np.uint64(1)).astype(bool)
    size, negative = (values[~(negative & (size == 0))] for values in (size, negative))  # zero has no sign
    kept = _coins((size - deviation**2 / scale) ** 2 / (2 * deviation**2), bits)
    signed: npt.NDArray[np.int64] = np.where(negative[kept], -size[kept], size[kept])
    return signed


def _coins(exponents: npt.NDArray[Any], bits: Bits) -> npt.NDArray[np.bool_]:
    """Truth values that are true with probability exp(−exponent), as a product of coins that are none below 1/e."""
    alive = np.arange(len(exponents))
    left = exponents.astype(np.float64)
    result = np.zeros(len(exponents), bool)
    while len(alive):
        step = np.minimum(left[alive], 1.0)
        heads = (bits(len(alive)) >> np.uint64(11)) < np.exp(-step) * 2.0**53
        left[alive] -= step
        alive = alive[heads]
        done = left[alive] <= 0
        result[alive[done]] = True
        alive = alive[~done]
    return result
