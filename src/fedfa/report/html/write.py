"""From run folders to files: the page, and its figures as SVG and PNG."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfa.errors import FedfaError, RunError
from fedfa.report.html.chapters import chapters_of
from fedfa.report.html.drawing import file_png, file_svg
from fedfa.report.html.page import Page
from fedfa.report.html.palette import styles
from fedfa.report.html.reading import Findings, Problem, Run, find_runs
from fedfa.report.html.split import Splits
from fedfa.studies.files import write_atomically


@dataclass(frozen=True)
class Report:
    """What was written."""

    page: Path
    figures: tuple[Path, ...]
    problems: tuple[Problem, ...]
    runs: int
    going: int
    """Runs that are not finished."""


@dataclass
class Reporter:
    """Writes the report of some folders, once or again and again.

    Args:
        paths: Run folders, or folders of them.
        out: The HTML file.
        targets: Accuracies in percent for the table of costs; none: round ones.
        figures: Also write the figures as files, into ``NAME-figures/`` beside the page.
        command: Named on the page as what made it.

    Example:
        >>> Reporter([Path("runs/a")], Path("report.html")).figure_folder.as_posix()
        'report-figures'
    """

    paths: Sequence[Path]
    out: Path
    targets: Sequence[float] = ()
    figures: bool = True
    command: str = ""

    def __post_init__(self) -> None:
        self._splits = Splits()

    @property
    def figure_folder(self) -> Path:
        """Where the figures go."""
        return self.out.with_name(f"{self.out.stem}-figures")

    def runs(self) -> list[Run]:
        """The runs as they are now."""
        return find_runs(self.paths).runs

    def write(self) -> Report:
        """Write page and figures once.

        Raises:
            FedfaError: A path does not exist, no run can be read, or the page cannot be written.
        """
        found = find_runs(self.paths)
        if not found.runs:
            reasons = "; ".join(f"{problem.path} {problem.words}" for problem in found.problems)
            raise RunError(f"no run to report: {reasons}")
        page = self._page(found, None)
        self._put(page)
        files = self._figure_files(page) if self.figures else ()
        return _report(self.out, files, page, found)

    def watch(self, every: int, told: Callable[[Report], None], *, limit: float | None = None) -> Report:
        """Write the page again whenever a record has changed, until all runs are finished; then figures too.

        However it ends, the last page that is written does not load itself again.

        Args:
            every: Seconds between looks.
            told: Called after each writing.
            limit: Stop after so many seconds; left out, when all runs are finished.
        """
        began, before = time.monotonic(), None
        try:
            while True:
                found = find_runs(self.paths, wait=True)
                if found.runs and all(run.finished for run in found.runs):
                    return self.write()
                now = [(run.folder, run.changed, run.done) for run in found.runs], found.problems
                if now != before:
                    before = now
                    page = self._page(found, every)
                    self._put(page)
                    told(_report(self.out, (), page, found))
                if limit is not None and time.monotonic() - began >= limit:
                    break
                time.sleep(every if limit is None else max(0.0, min(every, began + limit - time.monotonic())))
        except BaseException:
            self._put(self._page(find_runs(self.paths, wait=True), None))
            raise
        found = find_runs(self.paths, wait=True)
        page = self._page(found, None)
        self._put(page)
        return _report(self.out, (), page, found)

    def _page(self, found: Findings, refresh: int | None) -> Page:
        chapters = chapters_of(found.runs)
        looks = styles(method.name for chapter in chapters for method in chapter.methods)
        return Page(
            chapters, looks, found.problems, self._splits, targets=self.targets, refresh=refresh, command=self.command
        )

    def _put(self, page: Page) -> None:
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.out, page.html)
        except OSError as error:
            raise RunError(f"cannot write {self.out}: {error.strerror}; choose another place with --out") from None

    def _figure_files(self, page: Page) -> tuple[Path, ...]:
        written: list[Path] = []
        self.figure_folder.mkdir(parents=True, exist_ok=True)
        pixels = True
        for name, figure in page.figures.items():
            svg = self.figure_folder / f"{name}.svg"
            write_atomically(svg, file_svg(figure.wide, figure.title, figure.alt))
            written.append(svg)
            if pixels:
                try:
                    write_atomically(svg.with_suffix(".png"), file_png(figure.wide))
                    written.append(svg.with_suffix(".png"))
                except FedfaError as error:  # no matplotlib: the page and the SVG files stand without it
                    page.problems.append(Problem(self.figure_folder, str(error)))
                    pixels = False
        return tuple(written)


def _report(out: Path, files: tuple[Path, ...], page: Page, found: Findings) -> Report:
    going = sum(not run.finished for run in found.runs)
    return Report(out, files, tuple(page.problems), len(found.runs), going)
