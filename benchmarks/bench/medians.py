"""Medians of measurements, their spread, and ratios between contenders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Measurement = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """A median with the smallest and largest value, or with its confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarise repetitions.

        Example:
            >>> Summary.of([3.0, 1.0, 2.0])
            Summary(median=2.0, low=1.0, high=3.0)
        """
        return cls(median(values), min(values), max(values))

    def text(self, digits: int = 2, unit: str = "") -> str:
        """The median, and the spread in brackets.

        Example:
            >>> Summary(1.0, 0.96, 1.04).text()
            '1.00 (0.96–1.04)'
        """
        return f"{self.median:,.{digits}f}{unit} ({self.low:,.{digits}f}–{self.high:,.{digits}f})"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median, between two of the sorted values, for any distribution.

    The number of values below the median is binomial: n/2 with a standard deviation of √n/2.

    Example:
        >>> median_interval([float(n) for n in range(1, 101)])
        (40.0, 61.0)
    """
    ordered, margin = sorted(values), 1.96 * len(values) ** 0.5 / 2
    low = max(0, int(len(values) / 2 - margin) - 1)
    return ordered[low], ordered[-1 - low]


def round_seconds(measurement: Measurement) -> float:
    """Median time of a round; the first round is not in the measurement."""
    return float(median(measurement["seconds"]))


def startup(measurement: Measurement) -> float:
    """Seconds from the launch of the process to the beginning of its first round.

    Where the program did not report that moment: the end of its first round minus the median of the others, so what
    slows the first round down counts as start-up.
    """
    return float(measurement.get("startup", measurement["first"] - round_seconds(measurement)))


def time_ratio(
    of: Sequence[Measurement], to: Sequence[Measurement], key: str = "seconds", *, by_round: bool = False
) -> Summary | None:
    """Median ratio of the times of two contenders; None if no repetition succeeded for both.

    Args:
        of: Measurements of the contender in the numerator, one per repetition.
        to: Those of the contender in the denominator.
        key: Which times.
        by_round: Pair the slots of interleaved contenders and give the confidence interval of the median. Otherwise
            pair the medians of each repetition and give the smallest and largest ratio.
    """
    both = [(a[key], b[key]) for a, b in zip(of, to, strict=False) if "failed" not in a and "failed" not in b]
    if not by_round:
        both = [([median(a)], [median(b)]) for a, b in both]
    ratios = [mine / theirs for a, b in both for mine, theirs in zip(a, b, strict=False)]
    if not ratios:
        return None
    return Summary(median(ratios), *median_interval(ratios)) if by_round else Summary.of(ratios)
