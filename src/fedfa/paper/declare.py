"""The declared studies: tables and figures of the paper as rows, columns and settings, read from TOML and checked."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedfa.errors import SettingsError
from fedfa.messages import nearest, validation_message


class _Declared(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Column(_Declared):
    """One setting: a data set and its split, or one value of what a figure varies."""

    name: str
    """Of the form ``fmnist/c2``."""
    title: str
    group: str
    """Columns of one group stand together."""
    preset: str
    settings: dict[str, Any] = Field(default_factory=dict)
    rows: tuple[str, ...] | None = None
    """The rows that this column has; left out, all."""


class Row(_Declared):
    """One method, or one form of it."""

    name: str
    """Without settings of its own that name a recipe, this is the recipe."""
    title: str
    settings: dict[str, Any] = Field(default_factory=dict)
    after: str | None = None
    """A row from whose finished run this one is made without training again; ``adds`` or ``settings`` say what
    follows the training."""
    adds: str | None = None
    """The method that follows the training, e.g. ``ccvr``."""
    from_server: dict[str, str] = Field(default_factory=dict)
    """Settings (by dotted key) that are the file of the server's last state of another row's finished run."""


class Reading(_Declared):
    """One way to read the paper: a layer of settings over all cells."""

    title: str
    words: str
    settings: dict[str, Any] = Field(default_factory=dict)
    networks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of a network, by its name, where this reading has others than the network's own."""


class Picture(_Declared):
    """How a figure is drawn."""

    draw: Literal["curves", "lines", "inside", "histograms"]
    """``curves``: accuracy by round, a panel per column; ``lines``: final accuracy by column, a panel per group;
    ``inside`` and ``histograms``: what the probes measured."""


class Study(_Declared):
    """One table or figure of the paper."""

    name: str
    title: str
    """The first comment line of its file."""
    kind: Literal["table", "figure"]
    rounds: int = Field(ge=1)
    """As many as the paper's."""
    seeds: tuple[int, ...] = (1, 2, 3)
    note: str = ""
    """What a reader of the numbers should know."""
    first: tuple[str, ...] = ()
    """The rows that tell most: they are run first, in all columns."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """For all cells."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    picture: Picture | None = None

    @model_validator(mode="after")
    def _names_exist_once(self) -> Study:
        rows, columns = [row.name for row in self.rows], [column.name for column in self.columns]
        if twice := [name for names in (rows, columns) for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is there twice")
        named = [*self.first, *(row.after for row in self.rows if row.after)]
        named += [name for column in self.columns for name in column.rows or ()]
        named += [name for row in self.rows for name in row.from_server.values()]
        if unknown := [name for name in named if name not in rows]:
            raise ValueError(f"{unknown[0]!r} is not one of the rows {', '.join(rows)}")
        if (self.kind == "figure") != (self.picture is not None):
            raise ValueError("a figure says how it is drawn in [picture], a table does not")
        return self

    @property
    def looks_inside(self) -> bool:
        """Whether its runs must have been measured by probes."""
        return self.picture is not None and self.picture.draw in ("inside", "histograms")

    def row(self, name: str) -> Row:
        """A row by name."""
        return next(row for row in self.rows if row.name == name)

    def rows_of(self, column: Column) -> list[Row]:
        """The rows that a column has, in the declared order."""
        return [row for row in self.rows if column.rows is None or row.name in column.rows]


def read_study(name: str, text: str) -> Study:
    """A declaration's text, checked.

    Raises:
        SettingsError: Names the key that is wrong.
    """
    try:
        declared = tomllib.loads(text)
        return Study(name=name, title=text.partition("\n")[0].lstrip("# "), **declared)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"study {name}: not valid TOML: {error}") from None
    except ValidationError as error:
        raise SettingsError(f"study {name}: {validation_message(error, Study)}") from None


@cache
def studies() -> dict[str, Study]:
    """Every declared study by name: first the tables, then the figures.

    Example:
        >>> list(studies())[:2]
        ['label-skew', 'feature-skew']
    """
    folder = resources.files("fedfa.paper").joinpath("studies")
    order = tomllib.loads(folder.joinpath("order.toml").read_text("utf-8"))["order"]
    return {name: read_study(name, folder.joinpath(f"{name}.toml").read_text("utf-8")) for name in order}


def study(name: str) -> Study:
    """A study by name.

    Raises:
        SettingsError: There is none of that name; says which is nearest.
    """
    known = studies()
    if name not in known:
        raise SettingsError(f"unknown study {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return known[name]


@cache
def readings() -> dict[str, Reading]:
    """The ways to read the paper; the first one stands beside its numbers."""
    text = resources.files("fedfa.paper").joinpath("readings.toml").read_text("utf-8")
    return {name: Reading(**declared) for name, declared in tomllib.loads(text).items()}


def reading(name: str) -> Reading:
    """A reading by name."""
    known = readings()
    if name not in known:
        raise SettingsError(f"unknown reading {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return known[name]
