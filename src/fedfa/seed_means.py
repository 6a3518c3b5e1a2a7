"""Numbers over seeds: the mean, the standard deviation, and the seeds that stand behind them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

MEANING = (
    "mean(standard deviation) over seeds, in brackets the number of seeds (of the training; the split of the data is "
    "the same)"
)
"""What a :class:`SeedMean` says, for legends."""


def mean_text(mean: float, deviation: float | None) -> str:
    """A mean with its standard deviation, where there is one.

    Example:
        >>> mean_text(83.6, 0.412), mean_text(83.6, None)
        ('83.60(0.41)', '83.60')
    """
    return f"{mean:.2f}" + ("" if deviation is None else f"({deviation:.2f})")


@dataclass(frozen=True)
class SeedMean:
    """An accuracy in percent over the seeds of one method in one setting."""

    mean: float
    deviation: float | None
    """Standard deviation over seeds (n − 1 in the divisor); None for a single one."""
    seeds: tuple[int, ...]

    @classmethod
    def over(cls, values: Mapping[int, float]) -> Self | None:
        """From the values by seed; None if there is none.

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
    """Seeds, mean and standard deviation for a line of CSV; empty where there is nothing.

    Example:
        >>> csv_cells(SeedMean(83.6, None, (1,)))
        ('1', '83.6000', '')
    """
    if number is None:
        return ("", "", "")
    return (" ".join(map(str, number.seeds)), csv_number(number.mean), csv_number(number.deviation))


def csv_number(value: float | None) -> str:
    """A number for CSV; empty where there is none."""
    return "" if value is None else f"{value:.4f}"
