"""Tables of a comparison: methods × settings over seeds, missing runs, all runs, differences on equal seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedfa.errors import RunError
from fedfa.experiment.recorded_runs import read_run
from fedfa.experiment.run_directory import RunDirectory
from fedfa.experiment.sweep import Cell, Comparison
from fedfa.report.comparison_table import HEADER, comparison_rows
from fedfa.report.marks import marked, marks_of, marks_text
from fedfa.report.metric_table import NOTE, metric_table
from fedfa.report.paired_differences import (
    PAIRS_HEADER,
    PAIRS_LEGEND,
    Scores,
    paired_differences,
    paired_rows,
    scores_of,
)
from fedfa.seed_means import MEANING, SeedMean, csv_cells
from fedfa.text_tables import csv_table, latex_table, latex_text, markdown_table

NOTHING = "–"


@dataclass(frozen=True)
class SettingResults:
    """The results of one setting of a comparison."""

    labels: tuple[str, ...]
    """Texts that distinguish the setting from the others."""
    cells: Sequence[Cell]
    """All requested runs."""
    missing: Mapping[str, str]
    """Why a run has no result, by the name of the cell."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Methods that do not support this setting, and why."""

    @property
    def title(self) -> str:
        """The setting in one line."""
        return ", ".join(self.labels)

    @cached_property
    def scores(self) -> Mapping[str, Scores]:
        """The accuracies of the finished runs, by method and seed."""
        return scores_of({m: [cell.directory for cell in self.finished if cell.title == m] for m in self.methods})

    @property
    def methods(self) -> list[str]:
        """The requested methods."""
        return list(dict.fromkeys(cell.title for cell in self.cells))

    @property
    def finished(self) -> list[Cell]:
        """The cells with a result."""
        return [cell for cell in self.cells if cell.name not in self.missing]

    def of(self, method: str) -> SeedMean | None:
        """A method's final accuracy over its seeds; None if no run of it is finished."""
        scores = self.scores.get(method, {})
        return SeedMean.over({seed: scores[seed]["final_accuracy"] for seed in sorted(scores)})

    def marks_of(self, method: str) -> str:
        """Marks of a method: whose model was evaluated, and on what."""
        return "".join(
            marks_of(RunDirectory(cell.directory).metrics()) for cell in self.finished if cell.title == method
        )

    def missing_of(self, method: str) -> str:
        """The runs of a method without a result, each with the reason."""
        cells = [cell for cell in self.cells if cell.title == method and cell.name in self.missing]
        return "; ".join(f"{cell.directory.name} ({_in_one_line(self.missing[cell.name])})" for cell in cells)

    def note(self, method: str) -> str:
        """Note on a method's cell in the table; empty if all runs are finished."""
        if method in self.left_out:
            return f"left out ({_in_one_line(self.left_out[method])})"
        if not (missing := self.missing_of(method)):
            return ""
        found, asked = len(self.scores.get(method, {})), sum(cell.title == method for cell in self.cells)
        return f"{found} of {asked} {'seed' if asked == 1 else 'seeds'}; missing: {missing}"

    def run_rows(self) -> list[tuple[str, ...]]:
        """A row per finished run."""
        return comparison_rows([cell.directory for cell in self.finished])

    def metric_table(self) -> tuple[list[str], list[list[str]]] | None:
        """Metrics and clients' own data of the methods; None if there are none."""
        return metric_table(
            {m: [read_run(cell.directory) for cell in self.finished if cell.title == m] for m in self.methods}
        )

    def pair_rows(self) -> list[tuple[str, ...]]:
        """A row per pair of methods: the differences on the seeds that both have."""
        return paired_rows(self.scores)


def why_missing(work: Comparison, cell: Cell) -> str | None:
    """Why a run cannot be shown after the comparison; None if it can."""
    reason = work.missing(cell)
    if reason is None:
        try:
            comparison_rows([cell.directory])
        except RunError as error:
            return str(error)
    return reason


def method_rows(results: Sequence[SettingResults]) -> list[list[str]]:
    """A row per method, a cell per setting: mean(standard deviation) over seeds [number of seeds]."""
    return [
        [
            marked(method, [one.marks_of(method) for one in results]),
            *(str(one.of(method) or NOTHING) for one in results),
        ]
        for method in _methods(results)
    ]


def notes(results: Sequence[SettingResults]) -> list[str]:
    """Missing runs of each cell, with reasons."""
    lines = []
    for method in _methods(results):
        for one in results:
            if note := one.note(method):
                lines.append(f"{method}{f', {one.title}' if len(results) > 1 else ''}: {note}")
    return lines


def legend(results: Sequence[SettingResults]) -> str:
    """What the numbers mean."""
    rounds = {one.title: one.cells[0].config.rounds for one in results if one.cells}
    if len(set(rounds.values())) == 1:
        when = f"the last of {next(iter(rounds.values()))} rounds"
    else:
        when = f"the last round ({'; '.join(f'{title}: {number}' for title, number in rounds.items())})"
    marks = marks_text(one.marks_of(method) for one in results for method in one.methods)
    return f"Accuracy in percent after {when}, {MEANING}." + (f" {marks}" if marks else "")


def as_markdown(results: Sequence[SettingResults]) -> str:
    """Methods × settings; below, the runs of each setting and the differences between methods."""
    blocks = [markdown_table(_header(results), method_rows(results)), legend(results)]
    if lines := notes(results):
        blocks.append("\n".join(f"- {line}" for line in lines))
    for one in results:
        if rows := one.run_rows():
            blocks += [f"**{one.title}**"] if len(results) > 1 else []
            blocks.append(markdown_table(HEADER, rows))
        if (measured := one.metric_table()) is not None:
            blocks += [markdown_table(*measured), NOTE]
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
            rounds = next(cell.config.rounds for cell in one.cells if cell.title == method)
            lines.append([one.title, method, str(rounds), *csv_cells(one.of(method)), one.missing_of(method)])
    return csv_table(CSV_HEADER, lines)


def as_values(results: Sequence[SettingResults]) -> list[dict[str, Any]]:
    """Settings, methods, seeds and differences as plain values; accuracies in percent."""
    values = []
    for one in results:
        methods: dict[str, Any] = {}
        for method in one.methods:
            mean = one.of(method)
            methods[method] = {
                "mean": mean and mean.mean,
                "deviation": mean and mean.deviation,
                "seeds": one.scores.get(method, {}),
                "note": one.note(method),
            }
        pairs = [pair.values() for pair in paired_differences(one.scores)]
        values.append({"setting": one.title, "methods": methods, "differences": pairs})
    return values


def _methods(results: Sequence[SettingResults]) -> list[str]:
    return list(dict.fromkeys(method for one in results for method in one.methods))


def _header(results: Sequence[SettingResults]) -> list[str]:
    return ["method", *(one.title for one in results)]


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
