"""A study's cells: which runs it consists of, by settings; in the order in which they tell most."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedfa.errors import SettingsError
from fedfa.paper.declare import Column, Row, Study, reading, readings
from fedfa.studies.compare import Cell
from fedfa.studies.conclude import concluded_settings
from fedfa.studies.folder import RunFolder
from fedfa.studies.layers import flat, merge, nest
from fedfa.studies.settings import Settings, preset_layer

SERVER = "server.safetensors"
"""A finished run's file with the last state of its server."""

Key = frozenset[tuple[str, str]]
"""What a run is, whatever it is called and wherever it lies; without its seed and its rounds."""

_WITHOUT_EFFECT = ("engine.", "checkpoint.", "evaluation.", "insight.", "data.dir", "data.offline", "device")
_NOT_PART_OF_KEY = {"seed", "rounds", "algorithm.variant"}
"""The variant is a name; what it sets is in the settings."""


def key_of(settings: Settings) -> Key:
    """What a run is, by its settings: two runs with one key and one seed are repetitions of each other.

    Example:
        >>> a = Settings.preset("fmnist-c2", {"algorithm": {"recipe": "fedavg"}})
        >>> b = Settings.preset("fmnist-c2", {"algorithm": {"recipe": "fedavg", "variant": "paper"}, "seed": 7})
        >>> key_of(a) == key_of(b)
        True
    """
    return frozenset(
        (name, _plain(value))
        for name, value in flat(settings.to_dict()).items()
        if name not in _NOT_PART_OF_KEY and not name.startswith(_WITHOUT_EFFECT)
    )


def _plain(value: Any) -> str:
    """A value as text; of a file with a state only that it is one, because every machine has it elsewhere."""
    return SERVER if str(value).endswith(SERVER) else repr(value)


@dataclass(frozen=True)
class Place:
    """One place in a table: a study's column and row under one reading."""

    study: Study
    column: Column
    row: Row
    reading: str

    @property
    def name(self) -> str:
        """``fmnist/c2/fedfa``: what patterns are matched with."""
        return f"{self.column.name}/{self.row.name}"

    @cached_property
    def key(self) -> Key:
        """What a run must be to stand here."""
        return key_of(self.settings(self.study.rounds, 1))

    def settings(self, rounds: int, seed: int, servers: Mapping[str, Path] | None = None) -> Settings:
        """The settings of a run of this cell.

        Args:
            rounds: How many; the paper's are ``study.rounds``.
            seed: Of the training; the split of the data is the same for all.
            servers: For rows that start from another run's last state: its file, by row.
        """
        if self.row.after is not None:
            before = Place(self.study, self.column, self.study.row(self.row.after), self.reading)
            return concluded_settings(before.settings(rounds, seed, servers), self.row.adds, self.row.settings)
        named = {"algorithm": {"recipe": self.row.name}}
        if any("recipe" in layer.get("algorithm", {}) for layer in (self.study.settings, self.row.settings)):
            named = {}
        layers = [
            preset_layer(self.column.preset), named, self.study.settings, self.column.settings, self.row.settings,
            reading(self.reading).settings,
        ]  # fmt: skip
        for key, row in self.row.from_server.items():
            file = (servers or {}).get(row, Path(SERVER))
            layers.append(nest(key, str(file.resolve() if servers else file)))
        written: dict[str, Any] = {}
        for layer in layers:
            written = merge(written, layer)
        options = reading(self.reading).networks.get(written.get("model", {}).get("name", ""), {})
        written = merge(written, {"model": {"options": options}} if options else {})
        return Settings.resolve(written, {"rounds": rounds, "seed": seed})

    def folder_name(self, rounds: int, seed: int) -> Path:
        """Where a new run of this cell goes, below the folder for all: ``label-skew/fmnist-c2/fedfa-s1``."""
        other = "" if self.reading == next(iter(readings())) else f"@{self.reading}"
        shorter = "" if rounds == self.study.rounds else f"-r{rounds}"
        return Path(self.study.name) / self.column.name.replace("/", "-") / f"{self.row.name}{other}{shorter}-s{seed}"


def places(study: Study, reading: str | None = None) -> list[Place]:
    """All places of a study, column by column; without a reading under every one that gives runs of its own."""
    found: list[Place] = []
    for column in study.columns:
        for row in study.rows_of(column):
            keys: set[Key] = set()
            for name in readings() if reading is None else [reading]:
                place = Place(study, column, row, name)
                if place.key not in keys:  # most methods are the same under two readings
                    keys.add(place.key)
                    found.append(place)
    return found


def chosen(places: Sequence[Place], patterns: Sequence[str]) -> list[Place]:
    """The places whose names match a pattern such as ``fmnist/c2/*`` or ``*/fedfa``; all without patterns.

    Raises:
        SettingsError: A pattern matches nothing.
    """
    for pattern in patterns:
        if not any(_matches(place.name, pattern) for place in places):
            known, study = sorted({place.name for place in places}), places[0].study.name
            raise SettingsError(
                f"--cells {pattern!r} matches no cell of {study}; its cells are "
                f"{', '.join(known[:6])}{' …' if len(known) > 6 else ''} (`fedfa paper list {study}` shows all)"
            )
    return [place for place in places if not patterns or any(_matches(place.name, p) for p in patterns)]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern.rstrip('/')}/*")


def in_order(places: Sequence[Place], seeds: Sequence[int]) -> Iterator[tuple[Place, int]]:
    """Places and seeds, what tells most first.

    One seed everywhere before the next; the study's first rows in all columns before the others; a run that another one
    is made from before that one.
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
    """A run of a study: found by its settings, perhaps made from another one."""

    place: Place | None = None
    source: Path | None = None
    """The run folder from which this one is made once that is finished."""
    needs: tuple[Path, ...] = ()
    """Files of other runs that it starts from."""

    @property
    def name(self) -> str:
        """What the cell is called in messages."""
        assert self.place is not None
        reading = "" if self.place.reading == next(iter(readings())) else f"@{self.place.reading}"
        return f"{self.place.name}{reading} seed {self.settings.seed}"

    def matches(self, recorded: Settings) -> bool:
        """By what makes the result: how often it is evaluated or saved does not count."""
        same = (recorded.rounds, recorded.seed) == (self.settings.rounds, self.settings.seed)
        return same and key_of(recorded) == key_of(self.settings)

    def ready(self) -> bool:
        """Not before the runs that it is made from are finished."""
        finished = self.source is None or RunFolder(self.source).summary() is not None
        return finished and all(file.exists() for file in self.needs)

    def command(self) -> list[str]:
        """Train, or add to the source what follows the training."""
        begun = (self.folder / "checkpoint.safetensors").exists()
        if begun or self.source is None or not has_all(self.source):
            return super().command()
        assert self.place is not None
        row = self.place.row
        options = [f"--set={key}={_assigned(value)}" for key, value in flat(row.settings).items()]
        method = [] if row.adds is None else ["--algorithm", row.adds]
        return ["conclude", str(self.source), *method, *options, "--out", str(self.folder)]


def has_all(folder: Path) -> bool:
    """Whether a run is finished and all that is needed to add to it is there."""
    return all((folder / name).exists() for name in ("summary.json", "checkpoint.safetensors"))


def _assigned(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
