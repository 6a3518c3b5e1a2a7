"""What the paper reports."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fedfa.paper.declare import studies


@dataclass(frozen=True)
class Published:
    """A number of the paper in percent: the mean, and the standard deviation where it gives one."""

    mean: float
    deviation: float | None = None

    def __str__(self) -> str:
        """As the paper prints it."""
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f"({self.deviation:.2f})")


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


def by_preset() -> dict[str, dict[str, Published]]:
    """The paper's numbers by preset and row, for presets that are columns of a table as they are.

    Example:
        >>> print(by_preset()["fmnist-c2"]["fedavg"])
        74.60(1.42)
    """
    found: dict[str, dict[str, Published]] = {}
    for declared in studies().values():
        for column in declared.columns:
            if column.settings or declared.kind != "table":
                continue
            own = {row.name: published(declared.name, column.name, row.name) for row in declared.rows_of(column)}
            for row, number in own.items():
                if number is not None:
                    found.setdefault(column.preset, {}).setdefault(row, number)
    return found
