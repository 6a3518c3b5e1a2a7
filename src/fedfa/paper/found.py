"""Runs that are there already: found by their settings in folders of results, whatever they are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedfa.errors import FedfaError
from fedfa.paper.cells import Key, Place, key_of
from fedfa.studies.folder import RunFolder
from fedfa.studies.settings import InsightSettings

Measure = Literal["final", "last10"]
"""After the last round, or the mean of the last ten evaluations."""


@dataclass(frozen=True)
class Found:
    """One run that was begun."""

    folder: Path
    rounds: int
    """How many it was asked for."""
    seed: int
    summary: dict[str, Any] | None
    """The result, once it is finished."""
    insight: InsightSettings = field(default_factory=InsightSettings)
    """When and how its training is looked into."""

    @property
    def accuracy(self) -> float:
        """Of the global model on the test set after the last round, in percent."""
        return self.value("final")

    def value(self, measure: Measure) -> float:
        """An accuracy of a finished run, in percent."""
        assert self.summary is not None
        return 100 * float(self.summary[f"{measure}_accuracy"])


@dataclass(frozen=True)
class Runs:
    """The runs of some folders, by what they are."""

    by_key: dict[Key, list[Found]]
    unreadable: dict[Path, str] = field(default_factory=dict)
    """Folders that look like runs but cannot be read, and why."""

    @classmethod
    def below(cls, folders: Sequence[Path]) -> Runs:
        """Every run at any depth below some folders; of those before the others if one was run twice."""
        by_key: dict[Key, list[Found]] = {}
        unreadable: dict[Path, str] = {}
        seen: set[Path] = set()
        for config in (path for folder in folders for path in _configurations(folder)):
            if config.resolve() in seen:
                continue
            seen.add(config.resolve())
            record = RunFolder(config.parent)
            try:
                settings = record.settings()
                found = Found(config.parent, settings.rounds, settings.seed, record.summary(), settings.insight)
            except (FedfaError, ValueError, OSError) as error:  # JSON's and TOML's errors are ValueErrors
                unreadable[config.parent] = str(error)
                continue
            by_key.setdefault(key_of(settings), []).append(found)
        return cls(by_key, unreadable)

    def of(self, place: Place) -> list[Found]:
        """All runs of a cell, finished or not, of any length; if its study looks inside, those measured as it asks."""
        found = self.by_key.get(place.key, [])
        if not place.study.looks_inside:
            return found
        asked = place.settings(place.study.rounds, 1).insight
        return [run for run in found if run.insight == asked]

    def finished(self, place: Place, rounds: int) -> list[Found]:
        """The finished runs of a cell of one length: one for each seed, in their order."""
        by_seed: dict[int, Found] = {}
        for run in self.of(place):
            if run.summary is not None and run.rounds == rounds:
                by_seed.setdefault(run.seed, run)
        return [by_seed[seed] for seed in sorted(by_seed)]

    def lengths(self, place: Place) -> list[int]:
        """The numbers of rounds of a cell's finished runs, longest first."""
        return sorted({run.rounds for run in self.of(place) if run.summary is not None}, reverse=True)

    def begun(self, place: Place, rounds: int, seed: int, below: Path) -> Path | None:
        """The folder below another in which a run of this cell was begun but not finished."""
        for run in self.of(place):
            if run.summary is None and (run.rounds, run.seed) == (rounds, seed) and run.folder.is_relative_to(below):
                return run.folder
        return None


def _configurations(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.rglob("config.toml"))) if folder.is_dir() else iter(())
