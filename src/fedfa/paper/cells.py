"""Cells of a study: the runs it consists of, by configuration, most informative first."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedfa.errors import ConfigError
from fedfa.experiment.config import Config, affects_result, preset_layer
from fedfa.experiment.finalize import finalized_config
from fedfa.experiment.layers import flat, merge, nest, value_text
from fedfa.experiment.run_directory import RunDirectory
from fedfa.experiment.sweep import Cell
from fedfa.paper.declarations import Column, Row, Study, main_reading, reading, readings

SERVER = "server.safetensors"
"""File of a finished run with the final state of its server."""

Key = frozenset[tuple[str, str]]
"""The configuration that identifies a run, without its seed and its number of rounds."""

_ONLY_OBSERVE = ("evaluation.", "diagnostics.", "device")
"""Keys that change what is recorded, or the last digits, but not what is trained."""
_NOT_IN_KEY = {"seed", "rounds", "algorithm.variant"}
"""The variant is only a name: the configuration holds everything it sets."""


def key_of(config: Config | Mapping[str, Any]) -> Key:
    """The key of a complete configuration: two runs with the same key and seed repeat each other.

    Example:
        >>> a = Config.preset("fmnist-c2", {"algorithm": {"name": "fedavg"}})
        >>> b = Config.preset("fmnist-c2", {"algorithm": {"name": "fedavg", "variant": "paper"}, "seed": 7})
        >>> key_of(a) == key_of(b)
        True
    """
    return frozenset(
        # The path of a server state differs between machines, so only its name counts.
        (name, SERVER if str(value).endswith(SERVER) else repr(value))
        for name, value in flat(config.to_dict() if isinstance(config, Config) else config).items()
        if affects_result(name) and name not in _NOT_IN_KEY and not name.startswith(_ONLY_OBSERVE)
    )


@dataclass(frozen=True)
class Place:
    """One cell of a study's table: a column and a row under one reading."""

    study: Study
    column: Column
    row: Row
    reading: str

    @property
    def name(self) -> str:
        """For example ``fmnist/c2/fedfa``; patterns match it."""
        return f"{self.column.name}/{self.row.name}"

    @property
    def suffix(self) -> str:
        """``@READING`` for all readings but the first."""
        return "" if self.reading == main_reading() else f"@{self.reading}"

    @cached_property
    def key(self) -> Key:
        """The key of the runs of this cell."""
        return key_of(self.config(self.study.rounds, 1))

    def other_row(self, name: str) -> Place:
        """The cell of another row in the same column."""
        return Place(self.study, self.column, self.study.row(name), self.reading)

    def config(self, rounds: int, seed: int, servers: Mapping[str, Path] | None = None) -> Config:
        """The configuration of a run of this cell.

        Args:
            rounds: Number of rounds; ``study.rounds`` in the paper.
            seed: Seed of the training; the split of the data is the same for all.
            servers: File of the server state by row, for rows that start from another run's final state.
        """
        if self.row.after is not None:
            before = self.other_row(self.row.after).config(rounds, seed, servers)
            return finalized_config(before, self.row.adds, self.row.config)
        named = {"algorithm": {"name": self.row.name}}
        if any("name" in layer.get("algorithm", {}) for layer in (self.study.config, self.row.config)):
            named = {}
        layers = [
            preset_layer(self.column.preset), named, self.study.config, self.column.config, self.row.config,
            reading(self.reading).config,
        ]  # fmt: skip
        for key, row in self.row.from_server.items():
            file = (servers or {}).get(row, Path(SERVER))
            layers.append(nest(key, str(file.resolve() if servers else file)))
        written: dict[str, Any] = {}
        for layer in layers:
            written = merge(written, layer)
        options = reading(self.reading).networks.get(written.get("model", {}).get("name", ""), {})
        written = merge(written, {"model": {"options": options}} if options else {})
        return Config.resolve(written, {"rounds": rounds, "seed": seed})

    def directory(self, rounds: int, seed: int) -> Path:
        """Relative path of a new run of this cell: ``label-skew/fmnist-c2/fedfa-s1``."""
        shorter = "" if rounds == self.study.rounds else f"-r{rounds}"
        name = f"{self.row.name}{self.suffix}{shorter}-s{seed}"
        return Path(self.study.name) / self.column.name.replace("/", "-") / name


def places(study: Study, reading: str | None = None) -> list[Place]:
    """All cells of a study, column by column; without a reading, under every one that gives different runs."""
    found: list[Place] = []
    for column in study.columns:
        for row in study.rows_of(column):
            keys: set[Key] = set()
            for name in readings() if reading is None else [reading]:
                place = Place(study, column, row, name)
                if place.key not in keys:  # many methods are the same under two readings
                    keys.add(place.key)
                    found.append(place)
    return found


def chosen(places: Sequence[Place], patterns: Sequence[str]) -> list[Place]:
    """The cells whose names match a pattern such as ``fmnist/c2/*`` or ``*/fedfa``; all without patterns.

    Raises:
        ConfigError: A pattern matches no cell.
    """
    for pattern in patterns:
        if not any(_matches(place.name, pattern) for place in places):
            known, study = sorted({place.name for place in places}), places[0].study.name
            raise ConfigError(
                f"--cells {pattern!r} matches no cell of {study}; its cells are "
                f"{', '.join(known[:6])}{' …' if len(known) > 6 else ''} (`fedfa paper list {study}` shows all)"
            )
    return [place for place in places if not patterns or any(_matches(place.name, p) for p in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern.rstrip('/')}/*")


def in_order(places: Sequence[Place], seeds: Sequence[int]) -> Iterator[tuple[Place, int]]:
    """Cells and seeds, most informative first.

    One seed of all cells before the next seed; the study's first rows in all columns before the others; a run before
    those that are made from it.
    """
    for seed in seeds:
        yield from ((place, seed) for place in sorted(places, key=_importance))


def _importance(place: Place) -> tuple[bool, int, int]:
    study, row = place.study, place.row
    first = row.name in study.first
    rank = study.first.index(row.name) if first else study.rows.index(row)
    return (not first, study.columns.index(place.column), rank + (len(study.rows) if row.after else 0))


@dataclass(frozen=True)
class StudyCell(Cell):
    """A run of a study, possibly made from another run."""

    place: Place | None = None
    source: Path | None = None
    """Directory of the run that this one is made from once that is finished."""
    needs: tuple[Path, ...] = ()
    """Files of other runs that it starts from."""

    @property
    def name(self) -> str:
        """Name in messages."""
        assert self.place is not None
        return f"{self.place.name}{self.place.suffix} seed {self.config.seed}"

    def matches(self, recorded: Config) -> bool:
        """Whether a run has the same key, seed and number of rounds; how often it is evaluated or saved may differ."""
        same = (recorded.rounds, recorded.seed) == (self.config.rounds, self.config.seed)
        return same and key_of(recorded) == key_of(self.config)

    def ready(self) -> bool:
        """Whether the runs that it is made from are finished."""
        finished = self.source is None or RunDirectory(self.source).summary() is not None
        return finished and all(file.exists() for file in self.needs)

    def command(self) -> list[str]:
        """Arguments of ``fedfa``: train, or add the final pass to the source."""
        begun = (self.directory / "checkpoint.safetensors").exists()
        if begun or self.source is None or not can_be_extended(self.source):
            return super().command()
        assert self.place is not None
        row = self.place.row
        options = [f"--set={key}={value_text(value)}" for key, value in flat(row.config).items()]
        method = [] if row.adds is None else ["--algorithm", row.adds]
        return ["finalize", str(self.source), *method, *options, "--out", str(self.directory)]


def can_be_extended(directory: Path) -> bool:
    """Whether a run is finished and holds all that a final pass needs."""
    return all((directory / name).exists() for name in ("summary.json", "checkpoint.safetensors"))
