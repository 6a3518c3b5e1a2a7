"""Run folders as they are found: finished, going on, half-written or broken. Reading never fails, it names."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfa.errors import FedfaError, RunError
from fedfa.studies.folder import RunFolder
from fedfa.studies.settings import Settings

#: Any of these makes a folder a run folder, whole or not.
_MARKS = ("config.toml", "metrics.jsonl", "summary.json")
#: Folders are searched so deep; deeper ones belong to something else.
_DEPTH = 6


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it."""

    folder: Path
    place: str
    """Where it was found: runs of one place are compared with each other."""
    config: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any] | None
    insight: tuple[Mapping[str, Any], ...] = ()
    changed: float = 0.0
    """When the record was last written, in seconds since 1970."""

    @property
    def finished(self) -> bool:
        """Whether the run is whole."""
        return self.summary is not None

    @property
    def rounds(self) -> int:
        """Rounds that were asked for."""
        return int(self.config.get("rounds", 0))

    @property
    def done(self) -> int:
        """Rounds that are recorded."""
        return max((int(record["round"]) for record in self.metrics if "survey" not in record), default=0)

    @property
    def seed(self) -> int:
        """Seed of the training."""
        return int(self.config.get("seed", 0))

    @property
    def stem(self) -> str:
        """The folder's name without its seed: how ``fedfa compare`` names a method."""
        return self.folder.name.removesuffix(f"-s{self.seed}")

    @property
    def evaluated(self) -> list[Mapping[str, Any]]:
        """The rounds' records that hold an accuracy; what a survey gave is not among them."""
        return [record for record in self.metrics if record.get("accuracy") is not None and "survey" not in record]

    @property
    def survey(self) -> Mapping[str, Any] | None:
        """The record of what followed the last round (CCVR, FedFA's last calibration), if anything did."""
        return next((record for record in self.metrics if "survey" in record), None)


@dataclass(frozen=True)
class Problem:
    """Something that could not be read, in words."""

    path: Path
    words: str


@dataclass
class Findings:
    """What was found under the given paths."""

    runs: list[Run] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def find_runs(paths: Sequence[Path], *, wait: bool = False) -> Findings:
    """Read every run at or below some paths.

    A run folder that is named itself is compared with the others that are named themselves; runs inside a folder are
    compared with their neighbours.

    Args:
        paths: Run folders, or folders of them at any depth.
        wait: A path that does not exist yet is a note, not an error.

    Raises:
        RunError: A path does not exist.
    """
    found = Findings()
    seen: set[Path] = set()
    for path in paths:
        if not path.is_dir():
            if not wait:
                raise RunError(f"there is no folder {path}; name run folders, or folders that hold some")
            found.problems.append(Problem(path, "is not there yet"))
            continue
        holds_some = False
        for folder in _run_folders(path):
            holds_some = True
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            place = "" if folder == path else str(folder.parent)
            try:
                found.runs.append(_read(folder, place, found.problems))
            except _BrokenError as error:
                found.problems.append(Problem(folder, str(error)))
        if not holds_some:
            found.problems.append(Problem(path, "holds no run folder"))
    return found


class _BrokenError(Exception):
    """A folder cannot be shown at all."""


def _run_folders(path: Path, depth: int = 0) -> Iterator[Path]:
    """The run folders at or below a path, in the order of their names; none is searched further."""
    if any((path / mark).is_file() for mark in _MARKS):
        yield path
        return
    if depth == _DEPTH:
        return
    try:
        inside = sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inside:
        if not name.startswith("."):
            yield from _run_folders(path / name, depth + 1)


def _read(folder: Path, place: str, problems: list[Problem]) -> Run:
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _BrokenError("has no config.toml, so nothing says what was run") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise _BrokenError(f"config.toml cannot be read: {error}") from None
    config = _completed(config)
    record = RunFolder(folder)
    try:
        metrics = record.metrics()
        for line in metrics:
            _check_record(line)
    except (ValueError, TypeError, OSError) as error:
        raise _BrokenError(f"metrics.jsonl cannot be read: {error}") from None
    try:
        summary = record.summary()
    except (RunError, OSError) as error:
        problems.append(Problem(folder, f"summary.json cannot be read ({error}); shown as not finished"))
        summary = None
    if summary is not None and not metrics:
        problems.append(Problem(folder, "has a summary.json but no rounds in metrics.jsonl; shown without curves"))
    return Run(folder, place, config, tuple(metrics), summary, _insight(folder, problems), _changed(folder))


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """The settings with today's defaults for what is younger than the run; as they are where that is not possible."""
    try:
        return Settings.resolve(config).to_dict()
    except FedfaError:  # an own method whose file is elsewhere, or a key that is no more
        return config


def _check_record(record: Any) -> None:
    """A round's record must have what every picture needs."""
    if not isinstance(record, dict) or not isinstance(record.get("round"), int):
        raise ValueError("a line has no round")
    accuracy = record.get("accuracy")
    if accuracy is not None and not (isinstance(accuracy, int | float) and 0 <= accuracy <= 1):
        raise ValueError(f"round {record['round']} has the accuracy {accuracy!r}")


def _insight(folder: Path, problems: list[Problem]) -> tuple[Mapping[str, Any], ...]:
    from fedfa.insight.records import insight_records

    try:
        records = insight_records(folder)
        if not all(isinstance(record, dict) and isinstance(record.get("round"), int) for record in records):
            raise ValueError("a line has no round")
    except (ValueError, TypeError, OSError, FedfaError) as error:
        problems.append(Problem(folder, f"insight.jsonl cannot be read ({error}); shown without it"))
        return ()
    return tuple(records)


def _changed(folder: Path) -> float:
    times = [(folder / mark).stat().st_mtime for mark in _MARKS if (folder / mark).exists()]
    return max(times, default=0.0)
