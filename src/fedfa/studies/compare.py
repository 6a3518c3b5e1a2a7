"""Several runs as one piece of work: each in a process of its own, resumed where it was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedfa.algorithms.registry import methods_of, part_types
from fedfa.engines.cores import available_cores
from fedfa.errors import FedfaError, RunError, SettingsError
from fedfa.studies.folder import RunFolder
from fedfa.studies.layers import absolute_files, recipe_and_variant
from fedfa.studies.run import differences, same_run
from fedfa.studies.settings import Settings
from fedfa.studies.setup import method_fingerprints

GRACE_SECONDS = 30.0
"""How long a process that was asked to end may take."""

CellWatcher = Callable[["Cell", dict[str, Any]], None]
"""Called with a cell and the record of each of its rounds, as they come."""


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    title: str
    """The method as it was asked for, e.g. ``fedfa@authors``."""
    settings: Settings
    folder: Path
    setting: str = field(default="", kw_only=True)
    """The name of its setting, where a comparison has several."""

    @property
    def name(self) -> str:
        """What the cell is called in messages."""
        return f"{self.setting}/{self.folder.name}" if self.setting else self.folder.name

    def matches(self, recorded: Settings) -> bool:
        """Whether a run with these settings is this cell."""
        return same_run(recorded, self.settings)

    def finished(self) -> bool:
        """Whether the folder holds the finished record of exactly this run.

        Raises:
            RunError: The folder is damaged, or a method's file was changed since: the record is of something else.
        """
        record = RunFolder(self.folder)
        with self._reading():
            if record.summary() is None or not self.matches(record.settings()):
                return False
            recorded = record.origin()
        now = method_fingerprints(self.settings.algorithm.recipe)
        if changed := [what for what, mark in now.items() if recorded.get(what, mark) != mark]:
            raise RunError(
                f"{', '.join(changed)} changed since {self.folder} was run; remove that folder or choose another --out"
            )
        return True

    def check_begun(self) -> None:
        """Refuse a folder that holds another run than this one, or none that can be read.

        Raises:
            RunError: With what to do.
        """
        with self._reading():
            recorded = RunFolder(self.folder).settings()
        if not self.matches(recorded):
            other = "; ".join(differences(recorded, self.settings).values())
            raise RunError(
                f"{self.folder} holds a run with other settings ({other}); remove it or choose another --out"
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except RunError:  # says what to do
            raise
        except (FedfaError, ValueError, OSError) as error:  # JSON's and TOML's errors are ValueErrors
            raise RunError(f"{self.folder} cannot be read ({error}); remove it or choose another --out") from None

    def command(self) -> list[str]:
        """The arguments of ``fedfa`` that run it, or go on with it."""
        return ["run", "--resume", "--out", str(self.folder)]

    def ready(self) -> bool:
        """Whether it can begin, or should wait for another cell to end."""
        return True


def plan_cells(
    methods: Sequence[str],
    seeds: Sequence[int],
    layers: Sequence[Mapping[str, Any]],
    out: Path,
    setting: str = "",
    elsewhere: Path | None = None,
) -> list[Cell]:
    """The cells of a comparison under otherwise equal settings.

    Args:
        methods: Recipes, each with a variant if it has an ``@``: ``fedavg``, ``fedfa@authors``, ``fedfa+ccvr``.
        seeds: Of the training; the split of the data stays the same. None of them: the one of the settings.
        layers: Settings all cells have in common.
        out: The folder for the cells' run folders.
        setting: The name of these settings, where a comparison has several.
        elsewhere: A run that is not in ``out`` but in this folder, with the same settings, stays there.

    Example:
        >>> [c.folder.name for c in plan_cells(["fedavg", "fedfa@paper"], [1], [{"rounds": 2}], Path("runs/x"))]
        ['fedavg-s1', 'fedfa-paper-s1']
    """
    cells = []
    for method in methods:
        algorithm = recipe_and_variant(method)
        variant = f"-{algorithm['variant']}" if "variant" in algorithm else ""
        for seed in seeds or (None,):
            own: dict[str, Any] = {"algorithm": algorithm} | ({} if seed is None else {"seed": seed})
            settings = _resolve(layers, own)
            stem = "-".join(Path(name).stem for name in algorithm["recipe"].split("+")) + variant
            cell = Cell(method, settings, out / f"{stem}-s{settings.seed}", setting=setting)
            cells.append(_where_it_is(cell, elsewhere) if elsewhere else cell)
    folders = [cell.folder for cell in cells]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise SettingsError(f"two runs would go to {twice}; name each method and each seed once")
    return cells


def _where_it_is(cell: Cell, elsewhere: Path) -> Cell:
    """The cell in the folder that holds it, begun or finished; in its own folder if none does."""
    there = replace(cell, folder=elsewhere / cell.folder.name)
    try:
        begun = not cell.folder.exists() and there.matches(RunFolder(there.folder).settings())
    except (FedfaError, ValueError, OSError):  # no run, or none that can be read
        return cell
    return there if begun else cell


def _resolve(layers: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> Settings:
    """The cell's settings; options of a part that this method lacks are refused with the way to write them."""
    try:
        return Settings.resolve(*layers, own)
    except SettingsError as error:
        tables = {key for layer in layers for key, value in layer.get("algorithm", {}).items() if _is_table(value)}
        mine = {kind.name for kind in part_types(methods_of(absolute_files(own["algorithm"]["recipe"])))}
        if foreign := sorted(tables - mine):
            part = foreign[0]
            raise SettingsError(
                f"{error}. For the methods that have it, and no others, write with.{part} instead of algorithm.{part}: "
                f"--set with.{part}.OPTION=VALUE"
            ) from None
        raise


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


@dataclass
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    log: Path
    before: int
    """Where this process' part of the log begins."""
    shown: int = 0


@dataclass
class Comparison:
    """Runs cells, some at a time, each in a process of its own.

    They share the cores evenly. Where there are fewer cells than cores, a cell trains its clients in several workers;
    where there are enough, in one, because cells side by side never wait for each other's rounds. The results are the
    same.

    Args:
        cells: What to run, in this order; finished ones are left alone.
        jobs: How many at a time; None for one per core.
        watch: Told of each round.
        stop_at_failure: Do not begin or go on with the others once a cell failed.
        seconds: Stop in good order after so long; the rounds that are done are saved, and the next call goes on.
    """

    cells: Sequence[Cell]
    jobs: int | None
    watch: CellWatcher
    stop_at_failure: bool = False
    seconds: float | None = None
    failed: dict[str, str] = field(default_factory=dict)
    """What went wrong, by the cell's name; the other cells go on unless told otherwise."""
    busy: list[str] = field(default_factory=list)
    """Cells that another process is working on; they were left to it."""
    out_of_time: bool = False
    """Whether it stopped because the time was over."""
    _running: dict[Path, _Running] = field(default_factory=dict)

    def run(self) -> None:
        """Run what is missing. On any interruption every process is stopped in good order; call again to go on."""
        began = time.monotonic()
        waiting = [cell for cell in self.cells if self._is_missing(cell)]
        try:
            while (waiting or self._running) and not (self.failed and self.stop_at_failure):
                if self.seconds is not None and time.monotonic() - began >= self.seconds:
                    self.out_of_time = True
                    break
                self._fill(waiting)
                for running in list(self._running.values()):
                    self._look(running)
                time.sleep(0.2 if self._running else 0)
        finally:
            self._stop()

    def missing(self, cell: Cell) -> str | None:
        """After the work: why there is no finished record of a cell; None if there is one."""
        if cell.name in self.failed:
            return self.failed[cell.name]
        try:
            if cell.finished():
                return None
        except RunError as error:
            return str(error)
        return "another process is working on it" if cell.name in self.busy else "not finished"

    def _is_missing(self, cell: Cell) -> bool:
        try:
            return not cell.finished()
        except RunError as error:
            self.failed[cell.name] = str(error)
            return False

    def _fill(self, waiting: list[Cell]) -> None:
        """Begin cells while there is room; one that waits for another begins anyway once nothing else is going on."""
        cores = available_cores()
        jobs = self.jobs or cores
        while waiting and len(self._running) < jobs:
            ready = (number for number, cell in enumerate(waiting) if cell.ready())
            chosen = next(ready, None if self._running else 0)
            if chosen is None:
                return
            cell = waiting.pop(chosen)
            at_once = min(jobs, len(self._running) + 1 + len(waiting))
            try:
                running = self._start(cell, max(1, cores // at_once))
            except RunError as error:
                self.failed[cell.name] = str(error)
            else:
                if running is None and self.stop_at_failure:
                    self.failed[cell.name] = f"{cell.folder} is being written by another process"
                elif running is None:
                    self.busy.append(cell.name)
                else:
                    self._running[cell.folder] = running

    def _start(self, cell: Cell, cores: int) -> _Running | None:
        """Begin the cell's process, with so many cores for it; None if another process is working on the cell."""
        record = RunFolder(cell.folder)
        if record.in_use():
            return None
        if (cell.folder / "config.toml").exists():
            cell.check_begun()
        else:
            record.create(cell.settings)
            record.close()
        log = cell.folder.parent / f"{cell.folder.name}.log"
        # As a child that watches this process: however this one ends, no training is left behind.
        command = [sys.executable, "-m", "fedfa.cli.child", *cell.command()]
        with log.open("ab") as file:
            # The first is what available_cores goes by: the cell takes as many workers if that pays.
            environment = {**os.environ, "OMP_NUM_THREADS": str(cores), "MKL_NUM_THREADS": "1", "COLUMNS": "1000"}
            before = log.stat().st_size
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment)
            return _Running(cell, process, log, before)

    def _look(self, running: _Running) -> None:
        code = running.process.poll()
        cell = running.cell
        for record in RunFolder(cell.folder).metrics():
            if record["round"] > running.shown:
                running.shown = record["round"]
                self.watch(cell, record)
        if code is None:
            return
        del self._running[cell.folder]
        _close(running.process)
        if code and not self.stop_at_failure and self._is_taken(cell):  # it came first, while this one was starting
            self.busy.append(cell.name)
        elif code:
            said = running.log.read_bytes()[running.before :].decode("utf-8", errors="replace")
            _, mark, reason = said.rpartition("error:")
            killed = " (killed, perhaps for lack of memory: try OMP_NUM_THREADS=1)" if code == -signal.SIGKILL else ""
            self.failed[cell.name] = reason.strip() if mark else f"ended with code {code}{killed}; {running.log}"
        else:
            running.log.unlink(missing_ok=True)

    def _is_taken(self, cell: Cell) -> bool:
        """Whether another process is working on a cell, or has just finished it."""
        try:
            return RunFolder(cell.folder).in_use() or cell.finished()
        except RunError:
            return False

    def _stop(self) -> None:
        for running in self._running.values():
            running.process.terminate()
        for running in self._running.values():
            try:
                running.process.wait(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
            _close(running.process)
        self._running.clear()


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
