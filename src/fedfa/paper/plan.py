"""The missing runs of a study, as cells that can be run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedfa.errors import ConfigError
from fedfa.experiment.config import Config
from fedfa.experiment.recorded_runs import RecordedRun
from fedfa.paper.cells import SERVER, Place, StudyCell, can_be_extended, chosen, in_order, key_of, places
from fedfa.paper.declarations import Study
from fedfa.paper.run_index import RunIndex


def missing(
    study: Study,
    runs: RunIndex,
    out: Path,
    *,
    patterns: Sequence[str] = (),
    seeds: Sequence[int] = (),
    rounds: int | None = None,
    reading: str,
    data_dir: Path | None = None,
) -> list[StudyCell]:
    """The cells of a study without a finished run, most informative first.

    Args:
        study: The study.
        runs: Existing runs.
        out: Directory for new runs; unfinished runs below it continue where they are.
        patterns: Only cells whose names match one, e.g. ``fmnist/c2/*``; empty for all.
        seeds: Empty for the study's.
        rounds: Fewer rounds than the paper's, for a faster result; such runs are never mixed with others.
        reading: Reading of the paper; see ``readings.toml``.
        data_dir: Data directory.
    """
    length = rounds or study.rounds
    if length > study.rounds:
        raise ConfigError(f"--rounds {length} is more than the paper's {study.rounds}; give fewer, or leave it out")
    plan = _Plan(runs, out, length, data_dir)
    for place, seed in in_order(chosen(places(study, reading), patterns), seeds or study.seeds):
        if seed not in {run.seed for run in runs.finished(place, length)}:
            plan.add(place, seed)
    return plan.cells


class _Plan:
    """Cells in the order in which they were added; a run that fills several cells is planned once."""

    def __init__(self, runs: RunIndex, out: Path, rounds: int, data_dir: Path | None) -> None:
        self.runs, self.out, self.rounds = runs, out, rounds
        self.above = {} if data_dir is None else {"data": {"dir": str(data_dir)}}
        self.cells: list[StudyCell] = []

    def add(self, place: Place, seed: int) -> StudyCell:
        """Plan a run after those whose final state it starts from."""
        if (planned := self._planned(place, seed)) is not None:
            return planned
        servers = {row: self._server(place.other_row(row), seed) for row in place.row.from_server.values()}
        config = Config.resolve(place.config(self.rounds, seed, servers).to_dict(), self.above)
        unfinished = self.runs.unfinished(place, self.rounds, seed, self.out)
        directory = unfinished or self.out / place.directory(self.rounds, seed)
        source = None if place.row.after is None else self._source(place.other_row(place.row.after), seed)
        cell = StudyCell(place.row.title, config, directory, place, source, tuple(servers.values()))
        self.cells.append(cell)
        return cell

    def _planned(self, place: Place, seed: int) -> StudyCell | None:
        return next((c for c in self.cells if c.config.seed == seed and key_of(c.config) == place.key), None)

    def _source(self, other: Place, seed: int) -> Path | None:
        """The directory of a run that can be extended: finished with all that is needed, or planned."""
        for run in self._like(other, seed):
            if can_be_extended(run.path):
                return run.path
        planned = self._planned(other, seed)
        return None if planned is None else planned.directory

    def _server(self, other: Place, seed: int) -> Path:
        """The final server state of another run; if only its record is left, that run is planned again."""
        for run in self._like(other, seed):
            if run.finished and (run.path / SERVER).exists():
                return run.path / SERVER
        return self.add(other, seed).directory / SERVER

    def _like(self, place: Place, seed: int) -> list[RecordedRun]:
        return [run for run in self.runs.of(place) if (run.rounds, run.seed) == (self.rounds, seed)]
