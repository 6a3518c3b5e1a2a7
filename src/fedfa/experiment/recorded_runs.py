"""Read runs from disk: find run directories and load what they record, finished or not.

:class:`~fedfa.experiment.run_directory.RunDirectory` writes one directory; this module only reads, for tables, reports
and exports.
"""

from __future__ import annotations

import os
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedfa.diagnostics.records import diagnostics_records
from fedfa.errors import FedfaError, RunError
from fedfa.experiment.config import Config
from fedfa.experiment.record import accuracies, costs, whose_accuracy
from fedfa.experiment.run_directory import RunDirectory

Measure = Literal["final", "last10"]
"""Accuracy after the last round, or the mean of the last ten evaluations."""
_FILES = ("config.toml", "metrics.jsonl", "summary.json")
"""Any of these files makes a directory a run directory."""
_MAX_DEPTH = 6


@dataclass(frozen=True)
class RecordedRun:
    """One run as its directory records it."""

    path: Path
    config: Mapping[str, Any]
    """Nested dictionaries with today's keys and defaults; as written if this version rejects the configuration."""
    metrics: tuple[Mapping[str, Any], ...] = ()
    summary: Mapping[str, Any] | None = None
    """The result; None while the run is not finished."""
    group: str = ""
    """Directory that holds this run and those to compare it with; empty if the caller named the run itself."""
    changed: float = 0.0
    """Time of the last change, in seconds since 1970."""
    config_error: str = ""
    """Why this version rejects the configuration, e.g. a missing file of the user's own method."""
    summary_error: str = ""
    """Why ``summary.json`` cannot be read; ``summary`` is None then."""

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return self.summary is not None

    @property
    def rounds(self) -> int:
        """Number of rounds in the configuration."""
        return int(self.config.get("rounds", 0))

    @property
    def done(self) -> int:
        """Number of rounds recorded so far."""
        return max((int(record["round"]) for record in self.metrics if "final_pass" not in record), default=0)

    @property
    def seed(self) -> int:
        """Seed of the training."""
        return int(self.config.get("seed", 0))

    @property
    def stem(self) -> str:
        """Name of the directory without the seed: how ``fedfa compare`` names a method."""
        return self.path.name.removesuffix(f"-s{self.seed}")

    @property
    def label(self) -> str:
        """The method as ``fedfa compare`` was asked for it, ``fedfa@plus``, where the directory is named after it."""
        algorithm = self.config.get("algorithm", {})
        expression, variant = str(algorithm.get("name", "")), algorithm.get("variant")
        plain = "-".join(Path(name).stem for name in expression.split("+"))
        written = "+".join(Path(name).stem for name in expression.split("+"))
        names = {plain: written, f"{plain}-{variant}": f"{written}@{variant}"}
        return names.get(self.stem, self.stem)

    @property
    def evaluated(self) -> list[Mapping[str, Any]]:
        """Records of the evaluated rounds, without the final pass."""
        return [record for record in self.metrics if record.get("accuracy") is not None and "final_pass" not in record]

    @property
    def trained(self) -> list[Mapping[str, Any]]:
        """Records of all rounds, without the final pass."""
        return [record for record in self.metrics if "final_pass" not in record]

    @property
    def final_pass(self) -> Mapping[str, Any] | None:
        """Record of the final pass (CCVR, FedFA's final calibration), if there was one."""
        return next((record for record in self.metrics if "final_pass" in record), None)

    @property
    def whose(self) -> dict[str, str]:
        """Whose model the last evaluation was of (``model``), and on what (``on``)."""
        return whose_accuracy(self.metrics)

    @cached_property
    def results(self) -> dict[str, Any]:
        """The summary, or its accuracies and costs over the rounds so far.

        ``swing`` is the standard deviation of the last ten evaluations.
        """
        found: dict[str, Any] = dict(self.summary or {})
        if self.summary is None and self.metrics:
            found = {**accuracies(self.metrics), **costs(self.metrics)}
        if any("cpu_seconds" not in record for record in self.metrics):
            found.pop("cpu_seconds", None)  # older records lack it; a partial sum would mislead
        last = [record["accuracy"] for record in self.evaluated][-10:]
        if last:
            found["swing"] = statistics.pstdev(last)
        return found

    def accuracy(self, measure: Measure = "final") -> float:
        """Accuracy of a finished run, in percent."""
        assert self.summary is not None
        return 100 * float(self.summary[f"{measure}_accuracy"])

    @property
    def diagnostics(self) -> tuple[Mapping[str, Any], ...]:
        """Records of the diagnostics, one for each measured round; empty if there are none or they are damaged."""
        return self._diagnostics[0]

    @property
    def diagnostics_error(self) -> str:
        """Why the diagnostics cannot be read; empty if they can."""
        return self._diagnostics[1]

    @cached_property
    def _diagnostics(self) -> tuple[tuple[Mapping[str, Any], ...], str]:
        try:
            records = tuple(diagnostics_records(self.path))
            if not all(isinstance(record, dict) and isinstance(record.get("round"), int) for record in records):
                raise ValueError("a line has no round")
        except (ValueError, TypeError, OSError, FedfaError) as error:
            return (), str(error)
        return records, ""


@dataclass(frozen=True)
class Problem:
    """Something that cannot be read or shown, and why."""

    path: Path
    message: str


@dataclass
class FoundRuns:
    """The runs below some directories, and the run directories that cannot be read."""

    runs: list[RecordedRun] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def find_runs(paths: Iterable[Path]) -> FoundRuns:
    """Read every run at or below some paths, each once; paths that do not exist are skipped."""
    found = FoundRuns()
    seen: set[Path] = set()
    for path in paths:
        for directory in run_directories(path):
            if directory.resolve() in seen:
                continue
            seen.add(directory.resolve())
            try:
                found.runs.append(read_run(directory, "" if directory == path else str(directory.parent)))
            except RunError as error:
                found.problems.append(Problem(directory, str(error)))
    return found


def read_run(path: Path, group: str = "") -> RecordedRun:
    """Read one run directory.

    Raises:
        RunError: Configuration or metrics cannot be read. The message does not repeat the path.
    """
    try:
        config = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError("has no config.toml, so the configuration of the run is unknown") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise RunError(f"config.toml cannot be read: {error}") from None
    summary, config_error, summary_error = None, "", ""
    try:
        config = Config.resolve(config).to_dict()
    except FedfaError as error:
        config_error = str(error)
    directory = RunDirectory(path)
    try:
        directory.check_config()
        metrics = directory.metrics()
        for record in metrics:
            _check_record(record)
    except (ValueError, TypeError, OSError) as error:
        raise RunError(f"metrics.jsonl cannot be read: {error}") from None
    try:
        summary = directory.summary()
    except (RunError, OSError) as error:
        summary_error = str(error)
    changed = max((path / name).stat().st_mtime for name in _FILES if (path / name).exists())
    return RecordedRun(path, config, tuple(metrics), summary, group, changed, config_error, summary_error)


def run_directories(path: Path, depth: int = 0) -> Iterator[Path]:
    """The run directories at or below a path, sorted by name; run directories are not searched further."""
    if any((path / name).is_file() for name in _FILES):
        yield path
        return
    try:
        inside = sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inside if depth < _MAX_DEPTH else ():
        if not name.startswith("."):
            yield from run_directories(path / name, depth + 1)


def changes_of(directory: Path) -> str:
    """Changes whenever the record of a run does; reads no file."""
    marks = []
    for name in (*_FILES, "diagnostics.jsonl"):
        with suppress(OSError):
            found = (directory / name).stat()
            marks.append(f"{name} {found.st_mtime_ns} {found.st_size}")
    return "; ".join(marks)


def _check_record(record: Any) -> None:
    """Require the keys of a round's record that every reader uses."""
    if not isinstance(record.get("round"), int):
        raise ValueError("a line has no round")
    accuracy = record.get("accuracy")
    if accuracy is not None and not (isinstance(accuracy, int | float) and 0 <= accuracy <= 1):
        raise ValueError(f"round {record['round']} has the accuracy {accuracy!r}")
