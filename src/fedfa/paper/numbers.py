"""What the paper reports."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fedfa.seed_means import mean_text


@dataclass(frozen=True)
class Published:
    """A number of the paper in percent: the mean, and the standard deviation where it gives one."""

    mean: float
    deviation: float | None = None

    def __str__(self) -> str:
        """As the paper prints it."""
        return mean_text(self.mean, self.deviation)


@cache
def _all() -> dict[str, dict[str, dict[str, list[float]] | str]]:
    return tomllib.loads(resources.files("fedfa.paper").joinpath("numbers.toml").read_text("utf-8"))


def published(study: str, column: str, row: str) -> Published | None:
    """The paper's number in a cell, if it has one.

    Example:
        >>> print(published("label-skew", "fmnist/c2", "fedfa"))
        84.08(1.22)
    """
    numbers = _all().get(study, {}).get(column, {})
    found = numbers.get(row) if isinstance(numbers, dict) else None
    return None if found is None else Published(*found)


def source(study: str) -> str:
    """Which of the paper's tables a study's numbers come from; empty where the paper has none."""
    words = _all().get(study, {}).get("source", "")
    assert isinstance(words, str)
    return words
