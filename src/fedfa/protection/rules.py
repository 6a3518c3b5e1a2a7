"""Robust means of points: functions from points ``[n, d]`` to a centre ``[d]``, for any n ≥ 1.

Every rule returns the point itself for equal points, and moves with the points when they are all shifted.
``bad`` is the largest number of points that may be anything; rules use at most what n points can bear.

- Coordinate median and trimmed mean: D. Yin et al., *Byzantine-Robust Distributed Learning*, ICML 2018.
- Krum and Multi-Krum: P. Blanchard et al., *Machine Learning with Adversaries*, NeurIPS 2017.
- Geometric median: K. Pillutla, S. Kakade, Z. Harchaoui, *Robust Aggregation for Federated Learning*, IEEE TSP 2022.
- Centred clipping: S. P. Karimireddy, L. He, M. Jaggi, *Learning from History for Byzantine Robust Optimization*,
  ICML 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ITERATIONS = 200
"""Maximum number of steps to the geometric median."""
_CLIPPINGS = 3
"""Steps of centred clipping."""


def median(points: Tensor) -> Tensor:
    """Median of each coordinate; the mean of the middle two where their number is even.

    Example:
        >>> median(torch.tensor([[1.0], [5.0], [2.0], [99.0]]))
        tensor([3.5000])
    """
    ordered, n = points.sort(0).values, len(points)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed_mean(points: Tensor, bad: int) -> Tensor:
    """Mean of each coordinate without its ``bad`` smallest and ``bad`` largest values.

    Example:
        >>> trimmed_mean(torch.tensor([[1.0], [5.0], [2.0], [99.0]]), 1)
        tensor([3.5000])
    """
    n = len(points)
    cut = min(bad, (n - 1) // 2)
    return points.sort(0).values[cut : n - cut].mean(0)


def krum(points: Tensor, bad: int, chosen: int = 1) -> Tensor:
    """Mean of the points with the smallest sums of squared distances to their n − bad − 2 nearest neighbours.

    Args:
        points: The points.
        bad: How many may be anything.
        chosen: How many are averaged: 1 is Krum, n − bad Multi-Krum.

    Example:
        >>> krum(torch.tensor([[0.0], [1.0], [2.0], [1.5], [99.0]]), 1)
        tensor([1.5000])
    """
    n = len(points)
    if n == 1:
        return points[0]
    # Differences, not products: distances of points that nearly agree would be lost in rounding.
    squared = torch.stack([(points - point).square().sum(1) for point in points])
    squared.fill_diagonal_(torch.inf)
    neighbours = max(1, min(n - 1, n - bad - 2))
    scores = squared.sort(1).values[:, :neighbours].sum(1)
    best = scores.sort(stable=True).indices[: max(1, chosen)]
    return points[best.sort().values].mean(0)


def geometric_median(points: Tensor) -> Tensor:
    """The point with the smallest sum of distances, by Weiszfeld's smoothed steps.

    Example:
        >>> geometric_median(torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]], dtype=torch.float64))
        tensor([1., 1.], dtype=torch.float64)
    """
    centre = median(points)
    spread = float(median((points - centre).norm(dim=1)))  # a scale that no minority controls
    if spread == 0:  # more than half of the points are this one
        return centre
    for _ in range(_ITERATIONS):
        # Smoothed: a step from one of the points itself would divide by zero.
        weights = 1 / (points - centre).norm(dim=1).clamp(min=1e-9 * spread)
        moved = (weights / weights.sum()) @ points
        step = float((moved - centre).norm())
        centre = moved
        if step < 1e-10 * spread:
            break
    return centre


def centred_clipping(points: Tensor, start: Tensor, radius: float | None = None) -> Tensor:
    """``v ← v + mean of (x − v) clipped to a radius``, three times, from the last aggregate.

    Args:
        points: The points.
        start: v at first.
        radius: The radius; left out, the median of the points' distances from v.

    Example:
        >>> centred_clipping(torch.tensor([[1.0], [1.0], [1000.0]]), torch.zeros(1), 1.0).round(decimals=4)
        tensor([1.4444])
    """
    centre = start
    for _ in range(_CLIPPINGS):
        away = points - centre
        lengths = away.norm(dim=1, keepdim=True)
        limit = median(lengths) if radius is None else torch.as_tensor(radius, dtype=points.dtype)
        factors = torch.where(lengths > limit, limit / torch.where(lengths > 0, lengths, 1.0), 1.0)
        centre = centre + (away * factors).mean(0)
    return centre
