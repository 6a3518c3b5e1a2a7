"""Several runs, some at a time in warm processes, each resumed where it stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedfa.algorithms.registry import component_types, methods_of
from fedfa.engines.worker_count import available_cores
from fedfa.errors import ConfigError, FedfaError, RunError
from fedfa.experiment.build import method_fingerprints
from fedfa.experiment.config import Config
from fedfa.experiment.layers import absolute_files, expression_and_variant
from fedfa.experiment.run import differences, same_run
from fedfa.experiment.run_directory import RunDirectory
from fedfa.experiment.run_processes import RunProcess, RunProcesses

CellWatcher = Callable[["Cell", dict[str, Any]], None]
"""Called with a cell and each new record of it."""


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    title: str
    """The algorithm as requested, e.g. ``fedfa@authors``."""
    config: Config
    directory: Path
    setting: str = field(default="", kw_only=True)
    """The name of its setting, where a comparison has several."""

    @property
    def name(self) -> str:
        """The name of the cell in messages."""
        return f"{self.setting}/{self.directory.name}" if self.setting else self.directory.name

    def matches(self, recorded: Config) -> bool:
        """Whether a run with this config is this cell."""
        return same_run(recorded, self.config)

    def finished(self) -> bool:
        """Whether the directory holds the finished record of exactly this run.

        Raises:
            RunError: The directory is damaged, or the file of a method has changed since.
        """
        record = RunDirectory(self.directory)
        with self._reading():
            if record.summary() is None or not self.matches(record.config()):
                return False
            recorded = record.origin()
        now = method_fingerprints(self.config.algorithm.name)
        if changed := [what for what, mark in now.items() if recorded.get(what, mark) != mark]:
            raise RunError(
                f"{', '.join(changed)} changed since {self.directory} was run; remove it or choose another --out"
            )
        return True

    def check_begun(self) -> None:
        """Refuse a directory that holds another run, or one that cannot be read.

        Raises:
            RunError: With what to do.
        """
        with self._reading():
            recorded = RunDirectory(self.directory).config()
        if not self.matches(recorded):
            other = "; ".join(differences(recorded, self.config).values())
            raise RunError(
                f"{self.directory} holds a run with another config ({other}); remove it or choose another --out"
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except (FedfaError, ValueError, OSError) as error:  # JSON's and TOML's errors are ValueErrors
            raise RunError(f"{self.directory} cannot be read ({error}); remove it or choose another --out") from None

    def command(self) -> list[str]:
        """The arguments of ``fedfa`` that start or continue it."""
        return ["run", "--resume", "--out", str(self.directory)]

    def ready(self) -> bool:
        """Whether it can start, or should wait for another cell."""
        return True


def plan_cells(
    methods: Sequence[str],
    seeds: Sequence[int],
    layers: Sequence[Mapping[str, Any]],
    out: Path,
    setting: str = "",
    elsewhere: Path | None = None,
) -> list[Cell]:
    """The cells of a comparison under otherwise equal configs.

    Args:
        methods: Algorithm expressions, with a variant after ``@``: ``fedavg``, ``fedfa@authors``, ``fedfa+ccvr``.
        seeds: Of the training; the split of the data stays the same. None: the one of the config.
        layers: Config layers of all cells.
        out: Directory of the cells' run directories.
        setting: The name of the setting, where a comparison has several.
        elsewhere: A run that is not in ``out`` but in this directory, with the same config, stays there.

    Example:
        >>> [c.directory.name for c in plan_cells(["fedavg", "fedfa@paper"], [1], [{"rounds": 2}], Path("runs/x"))]
        ['fedavg-s1', 'fedfa-paper-s1']
    """
    cells = []
    for method in methods:
        algorithm = expression_and_variant(method)
        variant = f"-{algorithm['variant']}" if "variant" in algorithm else ""
        for seed in seeds or (None,):
            own: dict[str, Any] = {"algorithm": algorithm} | ({} if seed is None else {"seed": seed})
            config = _resolve(layers, own)
            stem = "-".join(Path(name).stem for name in algorithm["name"].split("+")) + variant
            cell = Cell(method, config, out / f"{stem}-s{config.seed}", setting=setting)
            cells.append(_where_it_is(cell, elsewhere) if elsewhere else cell)
    directories = [cell.directory for cell in cells]
    if twice := next((directory for directory in directories if directories.count(directory) > 1), None):
        raise ConfigError(f"two runs would go to {twice}; name each method and each seed once")
    return cells


def _where_it_is(cell: Cell, elsewhere: Path) -> Cell:
    """The cell in the directory that holds it, started or finished; in its own directory if none does."""
    there = replace(cell, directory=elsewhere / cell.directory.name)
    try:
        begun = not cell.directory.exists() and there.matches(RunDirectory(there.directory).config())
    except (FedfaError, ValueError, OSError):  # no run, or none that can be read
        return cell
    return there if begun else cell


def _resolve(layers: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> Config:
    """The cell's config; options of a component that the algorithm lacks are refused with how to write them."""
    try:
        return Config.resolve(*layers, own)
    except ConfigError as error:
        tables = {
            key for layer in layers for key, value in layer.get("algorithm", {}).items() if isinstance(value, Mapping)
        }
        mine = {kind.name for kind in component_types(methods_of(absolute_files(own["algorithm"]["name"])))}
        if foreign := sorted(tables - mine):
            component = foreign[0]
            raise ConfigError(
                f"{error}. To set it only for the algorithms that have it, write with.{component} instead of "
                f"algorithm.{component}: --set with.{component}.OPTION=VALUE"
            ) from None
        raise


@dataclass
class _Running:
    cell: Cell
    process: RunProcess
    log: Path
    before: int
    """Where the log of this process begins."""
    shown: int = 0
    """The last round that was watched."""
    written: int = -1
    """Size of the metrics when they were read."""


@dataclass
class Comparison:
    """Runs cells, some at a time, in processes that take one cell after the other.

    They share the cores evenly. Where there are fewer cells than cores, a cell trains its clients in several workers;
    where there are enough, in one, because parallel cells never wait for each other's rounds. The results are the
    same.
    """

    cells: Sequence[Cell]
    """What to run, in this order; finished ones are left alone."""
    jobs: int | None
    """How many at a time; None for one per core."""
    watch: CellWatcher
    """Called after each round."""
    stop_at_failure: bool = False
    """Stop all cells once one has failed."""
    count: Callable[[int, int], None] | None = None
    """Called with the number of finished runs and of all, first and whenever a run ends."""
    seconds: float | None = None
    """Stop cleanly after this time; finished rounds are saved, and the next call continues."""
    processes: RunProcesses = field(default_factory=RunProcesses)
    """Where cells run; they are ended with the comparison unless ``keep_processes``."""
    keep_processes: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    """Error messages by the name of the cell."""
    busy: list[str] = field(default_factory=list)
    """Cells that another process is working on."""
    out_of_time: bool = False
    """Whether it stopped because the time was up."""
    _running: dict[Path, _Running] = field(default_factory=dict)
    _finished: int = 0

    def run(self) -> None:
        """Run what is missing. On interruption every process is stopped cleanly; call again to continue."""
        began = time.monotonic()
        waiting = [cell for cell in self.cells if self._is_missing(cell)]
        self._finished = len(self.cells) - len(waiting) - len(self.failed)
        self._count()
        try:
            while (waiting or self._running) and not (self.failed and self.stop_at_failure):
                if self.seconds is not None and time.monotonic() - began >= self.seconds:
                    self.out_of_time = True
                    break
                self._fill(waiting)
                for running in list(self._running.values()):
                    self._look(running)
                time.sleep(0.05 if self._running else 0)
        finally:
            self._stop()

    def missing(self, cell: Cell) -> str | None:
        """Why there is no finished record of a cell; None if there is one."""
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

    def _count(self) -> None:
        if self.count is not None:
            self.count(self._finished, len(self.cells))

    def _fill(self, waiting: list[Cell]) -> None:
        """Start cells while cores are free; one that waits for another starts anyway once nothing else runs."""
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
                    self.failed[cell.name] = f"{cell.directory} is being written by another process"
                elif running is None:
                    self.busy.append(cell.name)
                else:
                    self._running[cell.directory] = running

    def _start(self, cell: Cell, cores: int) -> _Running | None:
        """Start the cell's process with this many cores; None if another process is working on the cell."""
        record = RunDirectory(cell.directory)
        if record.in_use():
            return None
        if (cell.directory / "config.toml").exists():
            cell.check_begun()
        else:
            record.create(cell.config)
            record.close()
        log = cell.directory.parent / f"{cell.directory.name}.log"
        before = log.stat().st_size if log.exists() else 0
        process = self.processes.take()
        # available_cores reads it: the cell uses that many workers if that pays.
        process.start(cell.command(), {"OMP_NUM_THREADS": str(cores)}, log)
        return _Running(cell, process, log, before)

    def _look(self, running: _Running) -> None:
        code = running.process.poll()
        cell = running.cell
        metrics = cell.directory / "metrics.jsonl"
        if (written := metrics.stat().st_size if metrics.exists() else 0) != running.written:
            running.written = written
            for record in RunDirectory(cell.directory).metrics():
                if record["round"] > running.shown:
                    running.shown = record["round"]
                    self.watch(cell, record)
        if code is None:
            return
        del self._running[cell.directory]
        if code and not running.log.exists():  # it failed before it began
            running.log.write_text(running.process.said(), encoding="utf-8")
        self.processes.give_back(running.process)
        if code and not self.stop_at_failure and self._is_taken(cell):  # the other process was faster
            self.busy.append(cell.name)
        elif code:
            said = running.log.read_bytes()[running.before :].decode("utf-8", errors="replace")
            _, mark, reason = said.rpartition("error:")
            killed = " (killed, perhaps for lack of memory: try OMP_NUM_THREADS=1)" if code == -signal.SIGKILL else ""
            self.failed[cell.name] = reason.strip() if mark else f"ended with code {code}{killed}; {running.log}"
        else:
            running.log.unlink(missing_ok=True)
            self._finished += 1
            self._count()

    def _is_taken(self, cell: Cell) -> bool:
        """Whether another process is working on a cell, or has just finished it."""
        try:
            return RunDirectory(cell.directory).in_use() or cell.finished()
        except RunError:
            return False

    def _stop(self) -> None:
        for running in self._running.values():
            running.process.terminate()
        for running in self._running.values():
            running.process.close()
        self._running.clear()
        if not self.keep_processes:
            self.processes.close()
