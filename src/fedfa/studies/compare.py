"""Several runs as one piece of work: methods × seeds, each in a process of its own, resumed where it was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfa.errors import RunError, SettingsError
from fedfa.studies.folder import RunFolder
from fedfa.studies.run import same_run
from fedfa.studies.settings import Settings

CellWatcher = Callable[["Cell", dict[str, Any]], None]
"""Called with a cell and the record of each of its rounds, as they come."""


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    title: str
    """The method as it was asked for, e.g. ``fedfa@authors``."""
    settings: Settings
    folder: Path

    def finished(self) -> bool:
        """Whether the folder holds the finished record of exactly this run."""
        record = RunFolder(self.folder)
        return record.summary() is not None and same_run(record.settings(), self.settings)


def plan_cells(
    methods: Sequence[str], seeds: Sequence[int], layers: Sequence[Mapping[str, Any]], out: Path
) -> list[Cell]:
    """The cells of a comparison under otherwise equal settings.

    Args:
        methods: Recipes, each with a variant if it has an ``@``: ``fedavg``, ``fedfa@authors``, ``fedfa+ccvr``.
        seeds: Of the training; the split of the data stays the same.
        layers: Settings all cells have in common.
        out: The folder for the cells' run folders.

    Example:
        >>> [c.folder.name for c in plan_cells(["fedavg", "fedfa@paper"], [1], [{"rounds": 2}], Path("runs/x"))]
        ['fedavg-s1', 'fedfa-paper-s1']
    """
    cells = []
    for method in methods:
        recipe, at, variant = method.rpartition("@")
        if not at or "/" in variant or variant.endswith(".py"):  # an @ in a path
            recipe, variant = method, ""
        for seed in seeds:
            own: dict[str, Any] = {"seed": seed, "algorithm": {"recipe": recipe}}
            if variant:
                own["algorithm"]["variant"] = variant
            stem = "-".join(Path(name).stem for name in recipe.split("+")) + (f"-{variant}" if variant else "")
            cells.append(Cell(method, Settings.resolve(*layers, own), out / f"{stem}-s{seed}"))
    folders = [cell.folder for cell in cells]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise SettingsError(f"two runs would go to {twice}; name each method and each seed once")
    return cells


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    log: Path
    shown: int = 0


@dataclass
class Comparison:
    """Runs cells, some at a time, each in a process with one thread.

    Two processes with one thread each are faster than one with two, and the results are the same.

    Args:
        cells: What to run; finished ones are left alone.
        jobs: How many at a time.
        watch: Told of each round.
        stop_at_failure: Do not begin or go on with the others once a cell failed.
    """

    cells: Sequence[Cell]
    jobs: int
    watch: CellWatcher
    stop_at_failure: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    """What went wrong, by the cell's folder name; the other cells go on unless told otherwise."""
    _running: dict[str, _Running] = field(default_factory=dict)

    def run(self) -> None:
        """Run what is missing. On any interruption every process is stopped in good order; call again to go on."""
        waiting = [cell for cell in self.cells if not cell.finished()]
        by_name = {cell.folder.name: cell for cell in self.cells}
        try:
            while (waiting or self._running) and not (self.failed and self.stop_at_failure):
                while waiting and len(self._running) < self.jobs:
                    cell = waiting.pop(0)
                    try:
                        self._running[cell.folder.name] = self._start(cell)
                    except RunError as error:
                        self.failed[cell.folder.name] = str(error)
                for name in list(self._running):
                    self._look(by_name[name])
                time.sleep(0.2 if self._running else 0)
        finally:
            self._stop()

    def _start(self, cell: Cell) -> _Running:
        record = RunFolder(cell.folder)
        if (cell.folder / "config.toml").exists():
            if not same_run(record.settings(), cell.settings):
                raise RunError(f"{cell.folder} holds a run with other settings; remove it or choose another --out")
        else:
            record.create(cell.settings)
            record.close()
        log = cell.folder.parent / f"{cell.folder.name}.log"
        # The cells already share the cores; one process each.
        command = [sys.executable, "-m", "fedfa", "run", "--resume", "--workers", "1", "--out", str(cell.folder)]
        with log.open("wb") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "1000"}
            return _Running(subprocess.Popen(command, stdout=file, stderr=file, env=environment), log)

    def _look(self, cell: Cell) -> None:
        running = self._running[cell.folder.name]
        code = running.process.poll()
        for record in RunFolder(cell.folder).metrics():
            if record["round"] > running.shown:
                running.shown = record["round"]
                self.watch(cell, record)
        if code is None:
            return
        del self._running[cell.folder.name]
        if code:
            _, mark, reason = running.log.read_text(encoding="utf-8", errors="replace").rpartition("error:")
            killed = " (killed, perhaps for lack of memory: fewer --jobs)" if code == -signal.SIGKILL else ""
            self.failed[cell.folder.name] = reason.strip() if mark else f"ended with code {code}{killed}; {running.log}"
        else:
            running.log.unlink(missing_ok=True)

    def _stop(self) -> None:
        for running in self._running.values():
            running.process.terminate()
        for running in self._running.values():
            running.process.wait()
        self._running.clear()
