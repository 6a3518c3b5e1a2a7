"""Write the report: the page, and its figures as SVG and PNG files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfa.errors import FedfaError, RunError
from fedfa.experiment.files import write_atomically
from fedfa.experiment.recorded_runs import FoundRuns, Problem, RecordedRun, find_runs
from fedfa.report.html.data_split import Splits
from fedfa.report.html.drawing import file_png, file_svg
from fedfa.report.html.grouping import chapters_of
from fedfa.report.html.page import Page
from fedfa.report.html.palette import styles
from fedfa.report.html.tuning_figures import still_training


@dataclass(frozen=True)
class Report:
    """What was written."""

    page: Path
    figures: tuple[Path, ...]
    problems: tuple[Problem, ...]
    runs: int
    unfinished: int


@dataclass
class Reporter:
    """Writes the report of some runs, once or repeatedly.

    Example:
        >>> Reporter([Path("runs/a")], Path("report.html")).figure_directory.as_posix()
        'report-figures'
    """

    paths: Sequence[Path]
    """Run directories, or directories that hold some."""
    out: Path
    """The HTML file."""
    targets: Sequence[float] = ()
    """Accuracies in percent for the table of costs; empty for round ones."""
    figures: bool = True
    """Also write the figures as files, to ``NAME-figures/`` beside the page."""
    command: str = ""
    """The command that writes the page, shown on it."""

    def __post_init__(self) -> None:
        self._splits = Splits()

    @property
    def figure_directory(self) -> Path:
        """Directory of the figures."""
        return self.out.with_name(f"{self.out.stem}-figures")

    def runs(self) -> list[RecordedRun]:
        """The runs in their current state."""
        return find_runs(self.paths).runs

    def write(self) -> Report:
        """Write page and figures once.

        Raises:
            FedfaError: A path does not exist, no run can be read, or the page cannot be written.
        """
        found = self._read()
        if not found.runs:
            reasons = "; ".join(f"{problem.path} {problem.message}" for problem in found.problems)
            raise RunError(f"no run to report: {reasons}")
        return self._write(found, figures=self.figures)

    def watch(self, every: int, on_write: Callable[[Report], None], *, limit: float | None = None) -> Report:
        """Write the page again whenever a record changes, until all runs are finished; then write the figures too.

        However it ends, the last page does not reload itself.

        Args:
            every: Seconds between checks.
            on_write: Called after each write.
            limit: Stop after this many seconds. Default: when all runs are finished.
        """
        began, before = time.monotonic(), None
        try:
            while True:
                found = self._read(wait=True)
                if found.runs and not still_training(found.runs):
                    return self.write()
                now = [(run.path, run.changed, run.done) for run in found.runs], found.problems
                if now != before:
                    before = now
                    on_write(self._write(found, refresh=every))
                if limit is not None and time.monotonic() - began >= limit:
                    break
                time.sleep(every if limit is None else max(0.0, min(every, began + limit - time.monotonic())))
        except BaseException:
            self._write(self._read(wait=True))
            raise
        return self._write(self._read(wait=True))

    def _read(self, *, wait: bool = False) -> FoundRuns:
        """Find the runs and add notes; with ``wait``, a path that does not exist yet is a note instead of an error."""
        absent = [path for path in self.paths if not path.is_dir()]
        if absent and not wait:
            raise RunError(f"{absent[0]}: no such directory; name run directories, or directories that hold some")
        found = find_runs(self.paths)
        directories = [run.path for run in found.runs] + [problem.path for problem in found.problems]
        for path in self.paths:
            if path in absent:
                found.problems.append(Problem(path, "does not exist yet"))
            elif not any(directory.resolve().is_relative_to(path.resolve()) for directory in directories):
                found.problems.append(Problem(path, "holds no run directory"))
        found.problems += [Problem(run.path, note) for run in found.runs for note in _notes(run)]
        return found

    def _write(self, found: FoundRuns, *, refresh: int | None = None, figures: bool = False) -> Report:
        chapters = chapters_of(found.runs)
        method_styles = styles(method.name for chapter in chapters for method in chapter.methods)
        page = Page(chapters, method_styles, found.problems, self._splits, self.targets, refresh, self.command)
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.out, page.html)
        except OSError as error:
            raise RunError(f"cannot write {self.out}: {error.strerror}; choose another file with --out") from None
        files = self._write_figures(page) if figures else ()
        unfinished = len(still_training(found.runs))
        return Report(self.out, files, tuple(page.problems), len(found.runs), unfinished)

    def _write_figures(self, page: Page) -> tuple[Path, ...]:
        written: list[Path] = []
        self.figure_directory.mkdir(parents=True, exist_ok=True)
        png = True
        for name, figure in page.figures.items():
            svg = self.figure_directory / f"{name}.svg"
            write_atomically(svg, file_svg(figure.wide, figure.title, figure.alt))
            written.append(svg)
            if png:
                try:
                    write_atomically(svg.with_suffix(".png"), file_png(figure.wide))
                    written.append(svg.with_suffix(".png"))
                except FedfaError as error:  # matplotlib is missing; page and SVG files do not need it
                    page.problems.append(Problem(self.figure_directory, str(error)))
                    png = False
        return tuple(written)


def _notes(run: RecordedRun) -> list[str]:
    """What is missing from the record of a run."""
    notes = []
    if run.summary_error:
        notes.append(f"summary.json cannot be read ({run.summary_error}); shown as not finished")
    if run.finished and not run.metrics:
        notes.append("has a summary.json but no rounds in metrics.jsonl; shown without curves")
    if run.diagnostics_error:
        notes.append(f"diagnostics.jsonl cannot be read ({run.diagnostics_error}); shown without it")
    return notes
