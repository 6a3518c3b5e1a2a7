"""What of a study is missing, as cells that can be run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedfa.errors import SettingsError
from fedfa.paper.cells import SERVER, Place, StudyCell, chosen, has_all, in_order, key_of, places
from fedfa.paper.declare import Study
from fedfa.paper.found import Found, Runs
from fedfa.studies.settings import Settings


def missing(
    study: Study,
    runs: Runs,
    out: Path,
    *,
    patterns: Sequence[str] = (),
    seeds: Sequence[int] = (),
    rounds: int | None = None,
    reading: str,
    data_dir: Path | None = None,
) -> list[StudyCell]:
    """The cells of a study that no finished run stands for, what tells most first.

    Args:
        study: Which.
        runs: What is there already.
        out: The folder for new runs; what was begun below it goes on where it is.
        patterns: Only cells whose names match one, e.g. ``fmnist/c2/*``; empty: all.
        seeds: Empty: the study's.
        rounds: Fewer than the paper's, to see something sooner; such runs never mix with others.
        reading: How the paper is read; see ``readings.toml``.
        data_dir: Where data sets are kept.
    """
    length = rounds or study.rounds
    if length > study.rounds:
        raise SettingsError(f"--rounds {length} is more than the paper's {study.rounds}; leave it out, or fewer")
    plan = _Plan(runs, out, length, data_dir)
    for place, seed in in_order(chosen(places(study, reading), patterns), seeds or study.seeds):
        if seed not in {run.seed for run in runs.finished(place, length)}:
            plan.add(place, seed)
    return plan.cells


class _Plan:
    """Cells in the order in which they were added, each run once however many places it has."""

    def __init__(self, runs: Runs, out: Path, rounds: int, data_dir: Path | None) -> None:
        self.runs, self.out, self.rounds = runs, out, rounds
        self.above = {} if data_dir is None else {"data": {"dir": str(data_dir)}}
        self.cells: list[StudyCell] = []

    def add(self, place: Place, seed: int) -> StudyCell:
        """Plan a run; the runs whose last state it starts from go before it."""
        planned = next((c for c in self.cells if c.settings.seed == seed and key_of(c.settings) == place.key), None)
        if planned is not None:
            return planned
        servers = {row: self._server(_other_row(place, row), seed) for row in place.row.from_server.values()}
        settings = Settings.resolve(place.settings(self.rounds, seed, servers).to_dict(), self.above)
        begun = self.runs.begun(place, self.rounds, seed, self.out)
        folder = begun or self.out / place.folder_name(self.rounds, seed)
        cell = StudyCell(
            place.row.title, settings, folder, place, self._source(place, seed), tuple(servers.values())
        )  # fmt: skip
        self.cells.append(cell)
        return cell

    def _source(self, place: Place, seed: int) -> Path | None:
        """The folder of the run that this one can be made from: finished with all it needs, or about to be run."""
        if place.row.after is None:
            return None
        other = _other_row(place, place.row.after)
        for run in self._like(other, seed):
            if has_all(run.folder):
                return run.folder
        planned = (c.folder for c in self.cells if c.settings.seed == seed and key_of(c.settings) == other.key)
        return next(planned, None)

    def _server(self, other: Place, seed: int) -> Path:
        """The last state of the server in another run; if only its record is there, that run is planned again."""
        for run in self._like(other, seed):
            if run.summary is not None and (run.folder / SERVER).exists():
                return run.folder / SERVER
        return self.add(other, seed).folder / SERVER

    def _like(self, place: Place, seed: int) -> list[Found]:
        return [run for run in self.runs.of(place) if (run.rounds, run.seed) == (self.rounds, seed)]


def _other_row(place: Place, row: str) -> Place:
    return Place(place.study, place.column, place.study.row(row), place.reading)
