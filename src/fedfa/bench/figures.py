"""From measurements to figures: medians, ratios, spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A median with the smallest and the largest of the repetitions, or with its interval."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """From the repetitions.

        Example:
            >>> Figure.of([3.0, 1.0, 2.0])
            Figure(middle=2.0, low=1.0, high=3.0)
        """
        return cls(median(values), min(values), max(values))

    def text(self, digits: int = 2, unit: str = "") -> str:
        """The median, and the spread in brackets.

        Example:
            >>> Figure(1.0, 0.96, 1.04).text()
            '1.00 (0.96–1.04)'
        """
        return f"{self.middle:,.{digits}f}{unit} ({self.low:,.{digits}f}–{self.high:,.{digits}f})"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the true median lies with 95 % confidence: between two of the sorted values, whatever their distribution.

    How many of n values are below the median is binomial: n/2 with a standard deviation of √n/2.

    Example:
        >>> median_interval([float(n) for n in range(1, 101)])
        (40.0, 61.0)
    """
    ordered, away = sorted(values), 1.96 * len(values) ** 0.5 / 2
    low = max(0, int(len(values) / 2 - away) - 1)
    return ordered[low], ordered[-1 - low]


def round_seconds(measurement: dict[str, Any]) -> float:
    """Time of a round in one measurement: the median of its rounds, the first left out."""
    return float(median(measurement["seconds"]))


def throughput(measurement: dict[str, Any], sample_steps: int) -> float:
    """Samples per second, each counted once per epoch."""
    return sample_steps / round_seconds(measurement)


def startup(measurement: dict[str, Any]) -> float:
    """Seconds from the launch of the process until its first round begins.

    Where the program did not note that moment: its first round less the median of the others, so that what made the
    first one slow counts to it.
    """
    return float(measurement.get("startup", measurement["first"] - round_seconds(measurement)))


def pairs(
    of: Sequence[dict[str, Any]], to: Sequence[dict[str, Any]], key: str = "seconds", *, by_round: bool = False
) -> list[tuple[float, float]]:
    """What two contenders measured side by side: medians of one repetition, or by round what lay within one turn.

    Repetitions in which either failed are left out.
    """
    both = [
        (mine[key], theirs[key])
        for mine, theirs in zip(of, to, strict=False)
        if "failed" not in mine and "failed" not in theirs
    ]
    if by_round:
        return [pair for mine, theirs in both for pair in zip(mine, theirs, strict=False)]
    return [(float(median(mine)), float(median(theirs))) for mine, theirs in both]


def ratio(of: Sequence[dict[str, Any]], to: Sequence[dict[str, Any]], *, by_round: bool = False) -> Figure | None:
    """How many times as fast one contender is as another: the median of the ratios of the :func:`pairs`.

    With it the smallest and the largest, or by round, where they are many, the 95 % interval of the median; None if
    there is no pair.
    """
    return summary([theirs / mine for mine, theirs in pairs(of, to, by_round=by_round)], by_round=by_round)


def summary(ratios: Sequence[float], *, by_round: bool) -> Figure | None:
    """The median with the spread that :func:`ratio` gives it."""
    if not ratios:
        return None
    return Figure(median(ratios), *median_interval(ratios)) if by_round else Figure.of(ratios)
