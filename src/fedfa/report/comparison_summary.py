"""The tables of a comparison: methods × settings over seeds, what is missing, the runs, differences on equal seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fedfa.errors import RunError
from fedfa.report.comparison_table import HEADER, comparison_rows
from fedfa.report.paired_differences import PAIRS_HEADER, PAIRS_LEGEND, Scores, paired_rows, scores_of
from fedfa.seed_means import MEANING, SeedMean, csv_cells
from fedfa.studies.compare import Cell, Comparison
from fedfa.text_tables import csv_table, latex_table, latex_text, markdown_table

NOTHING = "–"


@dataclass(frozen=True)
class SettingResults:
    """What came of one setting of a comparison."""

    words: tuple[str, ...]
    """What tells the setting from the others."""
    cells: Sequence[Cell]
    """All runs that were asked for."""
    missing: Mapping[str, str]
    """Why a run has no result, by the cell's name."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Methods that cannot work with this setting, and why."""

    @property
    def title(self) -> str:
        """The words in one line."""
        return ", ".join(self.words)

    @cached_property
    def scores(self) -> Mapping[str, Scores]:
        """The accuracies of the finished runs, by method and seed."""
        folders = {method: [cell.folder for cell in self.finished if cell.title == method] for method in self.methods}
        return scores_of(folders)

    @property
    def methods(self) -> list[str]:
        """Those that were asked for here."""
        return list(dict.fromkeys(cell.title for cell in self.cells))

    @property
    def finished(self) -> list[Cell]:
        """The cells that have a result."""
        return [cell for cell in self.cells if cell.name not in self.missing]

    def of(self, method: str) -> SeedMean | None:
        """A method's final accuracy over its seeds; None if no run of it is finished."""
        scores = self.scores.get(method, {})
        return SeedMean.over({seed: scores[seed]["final_accuracy"] for seed in sorted(scores)})

    def missing_of(self, method: str) -> str:
        """A method's runs that have no result, each with the reason."""
        cells = [cell for cell in self.cells if cell.title == method and cell.name in self.missing]
        return "; ".join(f"{cell.folder.name} ({_in_one_line(self.missing[cell.name])})" for cell in cells)

    def note(self, method: str) -> str:
        """What the reader has to know about a method's cell in the table; empty where it is whole."""
        if method in self.left_out:
            return f"left out ({_in_one_line(self.left_out[method])})"
        if not (missing := self.missing_of(method)):
            return ""
        found, asked = len(self.scores.get(method, {})), sum(cell.title == method for cell in self.cells)
        return f"{found} of {asked} {'seed' if asked == 1 else 'seeds'}; missing: {missing}"

    def run_rows(self) -> list[tuple[str, ...]]:
        """A row per finished run."""
        return comparison_rows([cell.folder for cell in self.finished])

    def pair_rows(self) -> list[tuple[str, ...]]:
        """A row per pair of methods: the differences on the seeds that both have."""
        return paired_rows(self.scores)


def why_missing(work: Comparison, cell: Cell) -> str | None:
    """Why a run cannot be shown after the work; None if it can."""
    reason = work.missing(cell)
    if reason is None:
        try:
            comparison_rows([cell.folder])
        except RunError as error:
            return str(error)
    return reason


def method_rows(results: Sequence[SettingResults]) -> list[list[str]]:
    """A row per method, a cell per setting: mean(standard deviation) over seeds, in brackets their number."""
    return [[method, *(str(one.of(method) or NOTHING) for one in results)] for method in _methods(results)]


def notes(results: Sequence[SettingResults]) -> list[str]:
    """Which runs are missing behind which cell, and why."""
    lines = []
    for method in _methods(results):
        for one in results:
            if words := one.note(method):
                lines.append(f"{method}{f', {one.title}' if len(results) > 1 else ''}: {words}")
    return lines


def legend(results: Sequence[SettingResults]) -> str:
    """What the numbers mean."""
    rounds = {one.title: one.cells[0].settings.rounds for one in results if one.cells}
    if len(set(rounds.values())) == 1:
        when = f"the last of {next(iter(rounds.values()))} rounds"
    else:
        when = f"the last round ({'; '.join(f'{title}: {number}' for title, number in rounds.items())})"
    return f"Accuracy in percent after {when}, {MEANING}."


def as_markdown(results: Sequence[SettingResults]) -> str:
    """Methods × settings; below, for each setting its runs and the differences between methods."""
    blocks = [markdown_table(_header(results), method_rows(results)), legend(results)]
    if lines := notes(results):
        blocks.append("\n".join(f"- {line}" for line in lines))
    for one in results:
        if rows := one.run_rows():
            blocks += [f"**{one.title}**"] if len(results) > 1 else []
            blocks.append(markdown_table(HEADER, rows))
        if pairs := one.pair_rows():
            blocks.append(markdown_table(PAIRS_HEADER, pairs))
    if any(one.pair_rows() for one in results):
        blocks.append(PAIRS_LEGEND)
    return "\n\n".join(blocks)


def as_latex(results: Sequence[SettingResults]) -> str:
    """Methods × settings as a LaTeX tabular."""
    lines = [legend(results), *notes(results)]
    return "\n\n".join(
        [latex_table(_header(results), method_rows(results)), "\n".join(f"% {latex_text(line)}" for line in lines)]
    )


CSV_HEADER = ("setting", "method", "rounds", "seeds", "mean", "std", "missing")


def as_csv(results: Sequence[SettingResults]) -> str:
    """One line per method and setting."""
    lines = []
    for one in results:
        for method in one.methods:
            rounds = next(cell.settings.rounds for cell in one.cells if cell.title == method)
            lines.append([one.title, method, str(rounds), *csv_cells(one.of(method)), one.missing_of(method)])
    return csv_table(CSV_HEADER, lines)


def _methods(results: Sequence[SettingResults]) -> list[str]:
    return list(dict.fromkeys(method for one in results for method in one.methods))


def _header(results: Sequence[SettingResults]) -> list[str]:
    return ["method", *(one.title for one in results)]


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
