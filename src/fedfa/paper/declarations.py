"""Declared studies, readings of the paper and its published numbers, read from TOML and validated."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedfa.error_messages import nearest, validation_message
from fedfa.errors import ConfigError
from fedfa.seed_means import mean_text

_FILES = resources.files("fedfa.paper")


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Column(_Declared):
    """A data set with its split, or one value of the quantity that a figure varies."""

    name: str
    """For example ``fmnist/c2``."""
    title: str
    group: str
    """Columns of one group stand side by side."""
    preset: str
    config: dict[str, Any] = Field(default_factory=dict)
    rows: tuple[str, ...] | None = None
    """Rows of this column; None for all."""


class Row(_Declared):
    """One method, or one form of it."""

    name: str
    """Also the algorithm expression, unless ``config`` names one."""
    title: str
    config: dict[str, Any] = Field(default_factory=dict)
    after: str | None = None
    """Row whose finished run this one extends by a final pass, without training again; see ``adds`` and ``config``."""
    adds: str | None = None
    """Method of the final pass, e.g. ``ccvr``."""
    from_server: dict[str, str] = Field(default_factory=dict)
    """Config keys (dotted) whose value is the final server state of another row's run."""


class Reading(_Declared):
    """One reading of the paper: a layer of configuration over all cells."""

    title: str
    description: str
    config: dict[str, Any] = Field(default_factory=dict)
    networks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of a network, by its name, where this reading differs from the network's defaults."""


class Picture(_Declared):
    """How a figure is drawn."""

    draw: Literal["curves", "lines", "diagnostics", "histograms"]
    """``curves``: accuracy by round, a panel per column; ``lines``: final accuracy by column, a panel per group;
    ``diagnostics`` and ``histograms``: what the diagnostics measured."""


class Study(_Declared):
    """One table or figure of the paper."""

    name: str
    title: str
    """The first comment line of the file."""
    kind: Literal["table", "figure"]
    rounds: int = Field(ge=1)
    """Number of rounds in the paper."""
    seeds: tuple[int, ...] = (1, 2, 3)
    note: str = ""
    """What a reader of the numbers should know."""
    first: tuple[str, ...] = ()
    """The most informative rows: they run first, in all columns."""
    config: dict[str, Any] = Field(default_factory=dict)
    """For all cells."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    picture: Picture | None = None

    @model_validator(mode="after")
    def _check_names(self) -> Study:
        rows, columns = [row.name for row in self.rows], [column.name for column in self.columns]
        if twice := [name for names in (rows, columns) for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is declared twice")
        named = [*self.first, *(row.after for row in self.rows if row.after)]
        named += [name for column in self.columns for name in column.rows or ()]
        named += [name for row in self.rows for name in row.from_server.values()]
        if unknown := [name for name in named if name not in rows]:
            raise ValueError(f"{unknown[0]!r} is not one of the rows {', '.join(rows)}")
        if (self.kind == "figure") != (self.picture is not None):
            raise ValueError("a figure needs a [picture] table, a table must not have one")
        return self

    @property
    def needs_diagnostics(self) -> bool:
        """Whether its runs must have recorded diagnostics."""
        return self.picture is not None and self.picture.draw in ("diagnostics", "histograms")

    def row(self, name: str) -> Row:
        """The row with a name."""
        return next(row for row in self.rows if row.name == name)

    def rows_of(self, column: Column) -> list[Row]:
        """The rows of a column, as declared."""
        return [row for row in self.rows if column.rows is None or row.name in column.rows]

    def groups(self) -> dict[str, list[Column]]:
        """The columns by group, as declared."""
        groups: dict[str, list[Column]] = {}
        for column in self.columns:
            groups.setdefault(column.group, []).append(column)
        return groups


def read_study(name: str, text: str) -> Study:
    """Parse and validate a declaration.

    Raises:
        ConfigError: Names the wrong key.
    """
    try:
        return Study(name=name, title=text.partition("\n")[0].lstrip("# "), **tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"study {name}: not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"study {name}: {validation_message(error, Study)}") from None


@cache
def studies() -> dict[str, Study]:
    """All studies by name, tables before figures.

    Example:
        >>> list(studies())[:2]
        ['label-skew', 'feature-skew']
    """
    directory = _FILES.joinpath("studies")
    order = tomllib.loads(directory.joinpath("order.toml").read_text("utf-8"))["order"]
    return {name: read_study(name, directory.joinpath(f"{name}.toml").read_text("utf-8")) for name in order}


def study(name: str) -> Study:
    """The study with a name.

    Raises:
        ConfigError: The name is unknown; suggests the nearest one.
    """
    if name not in studies():
        raise ConfigError(f"unknown study {name!r}{nearest(name, studies())}; known: {', '.join(studies())}")
    return studies()[name]


@cache
def readings() -> dict[str, Reading]:
    """The readings of the paper; the first one stands beside its numbers."""
    text = _FILES.joinpath("readings.toml").read_text("utf-8")
    return {name: Reading(**declared) for name, declared in tomllib.loads(text).items()}


def main_reading() -> str:
    """The name of the first reading."""
    return next(iter(readings()))


def reading(name: str) -> Reading:
    """The reading with a name.

    Raises:
        ConfigError: The name is unknown; suggests the nearest one.
    """
    if name not in readings():
        raise ConfigError(f"unknown reading {name!r}{nearest(name, readings())}; known: {', '.join(readings())}")
    return readings()[name]


@dataclass(frozen=True)
class Published:
    """A number of the paper in percent: the mean, and the standard deviation if reported."""

    mean: float
    deviation: float | None = None

    def __str__(self) -> str:
        """As printed in the paper."""
        return mean_text(self.mean, self.deviation)


@cache
def published_numbers() -> dict[str, dict[str, dict[str, list[float]] | str]]:
    """All numbers of the paper by study, column and row; ``source`` names the paper's table."""
    return tomllib.loads(_FILES.joinpath("numbers.toml").read_text("utf-8"))


def published(study: str, column: str, row: str) -> Published | None:
    """The paper's number in a cell; None if it has none.

    Example:
        >>> print(published("label-skew", "fmnist/c2", "fedfa"))
        84.08(1.22)
    """
    numbers = published_numbers().get(study, {}).get(column, {})
    found = numbers.get(row) if isinstance(numbers, dict) else None
    return None if found is None else Published(*found)


def source(study: str) -> str:
    """The paper's table that a study's numbers come from; empty if the paper has none."""
    name = published_numbers().get(study, {}).get("source", "")
    assert isinstance(name, str)
    return name
