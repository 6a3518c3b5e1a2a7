"""Existing runs, indexed by configuration: a run counts for a cell whatever its directory is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedfa.experiment.recorded_runs import RecordedRun, find_runs
from fedfa.paper.cells import Key, Place, key_of


@dataclass(frozen=True)
class RunIndex:
    """The runs below some directories by their key."""

    by_key: Mapping[Key, Sequence[RecordedRun]]
    unreadable: Mapping[Path, str] = field(default_factory=dict)
    """Run directories that cannot be read, and why."""

    @classmethod
    def below(cls, directories: Sequence[Path]) -> RunIndex:
        """Index every run below some directories; if a run exists twice, the one in the earlier directory counts."""
        found = find_runs(directories)
        by_key: dict[Key, list[RecordedRun]] = {}
        unreadable = {problem.path: problem.message for problem in found.problems}
        for run in found.runs:
            if error := run.config_error or run.summary_error:
                unreadable[run.path] = error
            else:
                by_key.setdefault(key_of(run.config), []).append(run)
        return cls(by_key, unreadable)

    def of(self, place: Place) -> Sequence[RecordedRun]:
        """All runs of a cell, finished or not, of any length.

        If the study needs diagnostics, only runs that recorded the diagnostics it asks for.
        """
        found = self.by_key.get(place.key, [])
        if not place.study.needs_diagnostics:
            return found
        asked = place.config(place.study.rounds, 1).to_dict()["diagnostics"]
        return [run for run in found if run.config["diagnostics"] == asked]

    def finished(self, place: Place, rounds: int) -> list[RecordedRun]:
        """The finished runs of a cell with a number of rounds: one for each seed, in ascending order."""
        by_seed: dict[int, RecordedRun] = {}
        for run in self.of(place):
            if run.finished and run.rounds == rounds:
                by_seed.setdefault(run.seed, run)
        return [by_seed[seed] for seed in sorted(by_seed)]

    def lengths(self, place: Place) -> list[int]:
        """The numbers of rounds of a cell's finished runs, longest first."""
        return sorted({run.rounds for run in self.of(place) if run.finished}, reverse=True)

    def unfinished(self, place: Place, rounds: int, seed: int, below: Path) -> Path | None:
        """The directory of an unfinished run of a cell below another directory."""
        for run in self.of(place):
            if not run.finished and (run.rounds, run.seed) == (rounds, seed) and run.path.is_relative_to(below):
                return run.path
        return None
