"""Means and standard deviations over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

MEANING = (
    "mean(standard deviation) over seeds, in brackets the number of seeds (of the training; the split of the data is "
    "the same)"
)
"""Meaning of a :class:`SeedMean`, for legends."""


def mean_text(mean: float, deviation: float | None) -> str:
    """Format a mean with its standard deviation, if there is one.

    Example:
        >>> mean_text(83.6, 0.412), mean_text(83.6, None)
        ('83.60(0.41)', '83.60')
    """
    return f"{mean:.2f}" + ("" if deviation is None else f"({deviation:.2f})")


@dataclass(frozen=True)
class SeedMean:
    """Mean of a value over the seeds of one method in one setting."""

    mean: float
    deviation: float | None
    """Standard deviation over seeds (divisor n − 1); None for a single seed."""
    seeds: tuple[int, ...]

    @classmethod
    def over(cls, values: Mapping[int, float]) -> Self | None:
        """Compute from values by seed; None if there are none.

        Example:
            >>> print(SeedMean.over({1: 83.0, 2: 84.0, 3: 86.5}))
            84.50(1.80) [3]
        """
        if not values:
            return None
        numbers = list(values.values())
        deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
        return cls(statistics.fmean(numbers), deviation, tuple(values))

    def __str__(self) -> str:
        """``83.31 [1]`` or ``83.60(0.41) [3]``: in brackets the number of seeds."""
        return f"{mean_text(self.mean, self.deviation)} [{len(self.seeds)}]"


def csv_cells(number: SeedMean | None) -> tuple[str, str, str]:
    """Seeds, mean and standard deviation for a line of CSV; empty strings for None.

    Example:
        >>> csv_cells(SeedMean(83.6, None, (1,)))
        ('1', '83.6000', '')
    """
    if number is None:
        return ("", "", "")
    return (" ".join(map(str, number.seeds)), csv_number(number.mean), csv_number(number.deviation))


def csv_number(value: float | None) -> str:
    """Format a number for CSV; empty for None."""
    return "" if value is None else f"{value:.4f}"
