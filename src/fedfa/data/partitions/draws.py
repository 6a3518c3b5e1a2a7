"""Random proportions, and their conversion to whole samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedfa.data.partitions.assignment import IntArray, Partition


def dirichlet_proportions(alpha: float, size: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """One draw from the symmetric Dir(α), computed with logarithms so that no α and no size gives NaN.

    A Gamma(α) variable is a Gamma(α + 1) variable times U^(1/α). For small α that power underflows to zero in every
    component, and dividing by the sum would give NaN.
    """
    log_gamma = np.log(rng.standard_gamma(alpha + 1, size)) + np.log1p(-rng.random(size)) / alpha
    weights = np.exp(log_gamma - log_gamma.max())
    return np.asarray(weights / weights.sum())


def cut(total: int, proportions: npt.NDArray[np.float64], rng: np.random.Generator) -> IntArray:
    """Owners of ``total`` samples in a row, cut at the running sum of the proportions.

    The cuts are rounded with one random offset, so that every client's expected share is its proportion exactly.
    Rounding them all down, as is common, gives the last client a sample of every class regardless of its proportion.
    """
    ends = (np.cumsum(proportions) * total + rng.random()).astype(np.int64)
    ends[-1] = total  # the running sum may stop a rounding error short of one
    return np.searchsorted(ends, np.arange(total), side="right").astype(np.int64)


def top_up(split: Partition, min_size: int, rng: np.random.Generator) -> Partition:
    """Give every client ``min_size`` samples by moving random samples from the largest clients.

    The donors are lowered to a common level, so that no client gives samples while a larger one keeps more. The caller
    ensures that there are enough samples.
    """
    sizes = split.sizes
    missing = np.maximum(min_size - sizes, 0)
    needed = int(missing.sum())
    if needed == 0:
        return split
    gives = _lower_to_level(sizes, needed)
    # A random order inside every client; its first `gives` samples leave.
    owners = split.owners()
    shuffled = np.lexsort((rng.random(len(owners)), owners))
    rank = np.arange(len(owners)) - np.repeat(split.offsets[:-1], sizes)
    leaving = rank < np.repeat(gives, sizes)
    new_owners = owners.copy()
    new_owners[leaving] = rng.permutation(np.repeat(np.arange(len(split)), missing))
    positions = split.order[shuffled]
    back = np.lexsort((positions, new_owners))
    offsets = np.concatenate([[0], np.cumsum(sizes - gives + missing)])
    return Partition(positions[back], offsets.astype(np.int64))


def _lower_to_level(sizes: IntArray, needed: int) -> IntArray:
    """Number of samples that each client gives, ``needed`` in all, taken from the largest clients."""
    low, high = 0, int(sizes.max())
    while low < high:  # the highest level that still yields enough samples
        level = (low + high + 1) // 2
        if int(np.maximum(sizes - level, 0).sum()) >= needed:
            low = level
        else:
            high = level - 1
    gives = np.maximum(sizes - low, 0)
    surplus = int(gives.sum()) - needed
    donors = np.flatnonzero(gives)[:surplus]  # each can keep one more: one level higher would not have sufficed
    gives[donors] -= 1
    return gives
