"""Table of a study: our numbers beside the paper's, with the seeds behind each number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedfa.experiment.recorded_runs import Measure, RecordedRun
from fedfa.paper.cells import Key, Place, places
from fedfa.paper.declarations import (
    Column,
    Published,
    Row,
    Study,
    main_reading,
    published,
    readings,
    source,
    studies,
)  # fmt: skip
from fedfa.paper.run_index import RunIndex
from fedfa.seed_means import MEANING, SeedMean, csv_cells, csv_number
from fedfa.student import critical_value
from fedfa.text_tables import csv_table, latex_table, latex_text, markdown_table

ABOVE, BELOW = "▲", "▼"
PAPER_TRIALS = 3
"""Trials behind each of the paper's means and standard deviations."""


@dataclass(frozen=True)
class TableCell:
    """Our number and the paper's, in percent."""

    ours: SeedMean | None
    paper: Published | None

    @property
    def mark(self) -> str:
        """A sign if our mean and the paper's differ by more than the noise between seeds explains; else empty.

        With k seeds of ours and the paper's three trials of standard deviation s, both means being uncertain, equal
        methods differ by more than t·s·√(1/k + 1/3) in one cell of twenty; t is Student's point for the two degrees of
        freedom of s.
        """
        if self.ours is None or self.paper is None or self.paper.deviation is None:
            return ""
        away = round(self.ours.mean - self.paper.mean, 6)
        noise = self.paper.deviation * math.sqrt(1 / len(self.ours.seeds) + 1 / PAPER_TRIALS)
        if abs(away) <= round(critical_value(PAPER_TRIALS - 1) * noise, 6):
            return ""
        return ABOVE if away > 0 else BELOW

    @property
    def ours_text(self) -> str:
        """Our number with its mark, or a dash."""
        return "–" if self.ours is None else f"{self.ours}{f' {self.mark}' if self.mark else ''}"

    @property
    def paper_text(self) -> str:
        """The paper's number, or a dash."""
        return "–" if self.paper is None else str(self.paper)


@dataclass(frozen=True)
class TableRow:
    """A method under one reading, with its runs of one length."""

    row: Row
    reading: str
    rounds: int
    cells: Mapping[str, TableCell | None]
    """By column; None if the study has no such cell."""

    @property
    def title(self) -> str:
        """The row's title, with the reading unless it is the first."""
        first = self.reading == main_reading()
        return self.row.title + ("" if first else f" · {readings()[self.reading].title}")


@dataclass(frozen=True)
class Block:
    """Rows of one length in one group of columns: a table of its own in every format."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[TableRow]
    full: bool
    """Whether the runs have the paper's number of rounds, so that its numbers stand beside ours."""


@dataclass(frozen=True)
class StudyTable:
    """The whole table."""

    study: Study
    rows: Sequence[TableRow]
    measure: Measure
    """Our measure; the paper's is always the accuracy after the last round."""

    def blocks(self) -> list[Block]:
        """One block per group of columns and length of runs; only rows with something to show."""
        blocks = []
        for group, columns in self.study.groups().items():
            rows = [row for row in self.rows if any(self._shows(row.cells[column.name]) for column in columns)]
            for rounds in dict.fromkeys(row.rounds for row in rows):
                full = rounds == self.study.rounds
                remark = "" if full else f", only {rounds} of the paper's {self.study.rounds} rounds"
                blocks.append(Block(group + remark, columns, [row for row in rows if row.rounds == rounds], full))
        return blocks

    def _shows(self, cell: TableCell | None) -> bool:
        # Beside another measure than its own, a number of the paper alone says nothing.
        return cell is not None and bool(cell.ours or (self.measure == "final" and cell.paper))


def numbers_by_key() -> dict[Key, tuple[int, Published]]:
    """The paper's rounds and number by key, from the first of its tables that has it.

    Runs with this project's own defaults are left out: they do not aim at the paper's numbers.
    """
    found: dict[Key, tuple[int, Published]] = {}
    for declared in studies().values():
        for place in places(declared) if declared.kind == "table" else []:
            number = published(declared.name, place.column.name, place.row.name)
            if number is not None and place.reading != "default":
                found.setdefault(place.key, (declared.rounds, number))
    return found


def study_table(study: Study, runs: RunIndex, measure: Measure = "final") -> StudyTable:
    """Our numbers beside the paper's.

    First the rows under the first reading at the paper's number of rounds; then, where runs exist, the other readings;
    then runs of fewer rounds. Runs of different lengths never share a cell.
    """
    names = list(readings())
    grid = {
        (row.name, name): {c.name: Place(study, c, row, name) for c in study.columns if row in study.rows_of(c)}
        for row in study.rows for name in names
    }  # fmt: skip
    lengths = {length for places in grid.values() for place in places.values() for length in runs.lengths(place)}
    shorter_ones = sorted((length for length in lengths if length < study.rounds), reverse=True)

    def made(row: Row, reading: str, rounds: int) -> TableRow:
        cells: dict[str, TableCell | None] = {column.name: None for column in study.columns}
        for column, place in grid[row.name, reading].items():
            ours = our_number(runs.finished(place, rounds), measure)
            compared = rounds == study.rounds and (ours is not None or reading == names[0])
            cells[column] = TableCell(ours, published(study.name, column, row.name) if compared else None)
        return TableRow(row, reading, rounds, cells)

    rows = [made(row, names[0], study.rounds) for row in study.rows]
    others = [made(row, name, study.rounds) for row in study.rows for name in names[1:]]
    shorter = [made(row, name, rounds) for rounds in shorter_ones for row in study.rows for name in names]
    seen: set[tuple[object, ...]] = set()
    for row in [*others, *shorter]:
        mark = (row.row.name, row.rounds, tuple(cell and cell.ours for cell in row.cells.values()))
        if any(cell is not None and cell.ours is not None for cell in row.cells.values()) and mark not in seen:
            seen.add(mark)  # a method that is the same under two readings is shown once
            rows.append(row)
    return StudyTable(study, rows, measure)


def our_number(runs: Sequence[RecordedRun], measure: Measure = "final") -> SeedMean | None:
    """Our number from the finished runs of one cell and one length, one run per seed."""
    return SeedMean.over({run.seed: run.accuracy(measure) for run in runs})


def legend(table: StudyTable) -> list[str]:
    """What the numbers mean, in sentences."""
    study = table.study
    what = f"after the last of {study.rounds} rounds"
    if table.measure == "last10":
        what = f"as the mean of the last ten evaluations of {study.rounds} rounds (the paper's is after the last one)"
    first = readings()[main_reading()].description
    lines = [f"Ours: accuracy in percent {what}, {MEANING}. Rows without a remark: {first}."]
    if source(study.name):
        lines.append(
            f"The paper: its {source(study.name)}, mean(standard deviation) of three trials where it gives one. "
            f"{ABOVE} and {BELOW}: our mean is above or below the paper's by more than seeds explain (Student's t for "
            "three trials, both means uncertain); of twenty equal cells about one would be marked."
        )
    shown = {row.reading for row in table.rows} - {main_reading()}
    lines += [f"{one.title}: {one.description}." for name, one in readings().items() if name in shown]
    return [*lines, *([study.note] if study.note else [])]


def _header_and_lines(block: Block) -> tuple[list[str], list[list[str]]]:
    """The text of a block, our numbers and the paper's side by side."""
    header, lines = ["method"], []
    for column in block.columns:
        header += [column.title, "the paper"] if block.full else [column.title]
    for row in block.rows:
        line = [row.title]
        for column in block.columns:
            cell = row.cells[column.name]
            texts = ("", "") if cell is None else (cell.ours_text, cell.paper_text)
            line += texts if block.full else texts[:1]
        lines.append(line)
    return header, lines


def as_markdown(table: StudyTable) -> str:
    """The table in Markdown."""
    blocks = [f"**{block.caption}**\n\n{markdown_table(*_header_and_lines(block))}" for block in table.blocks()]
    return "\n\n".join([*blocks, *legend(table)])


def as_latex(table: StudyTable) -> str:
    """The table in LaTeX, one tabular per block."""
    blocks = [f"% {block.caption}\n{latex_table(*_header_and_lines(block))}" for block in table.blocks()]
    return "\n\n".join([*blocks, *(f"% {line}" for line in map(latex_text, legend(table)))])


CSV_HEADER = (
    "study", "cell", "reading", "rounds", "paper rounds", "seeds", "ours mean", "ours std", "paper mean", "paper std",
    "differs",
)  # fmt: skip


def as_csv(table: StudyTable) -> str:
    """One line per cell with a number."""
    lines = []
    for row in table.rows:
        for column, cell in row.cells.items():
            if cell is None or (cell.ours is None and cell.paper is None):
                continue
            paper = cell.paper
            lines.append(
                [
                    table.study.name, f"{column}/{row.row.name}", row.reading, str(row.rounds), str(table.study.rounds),
                    *csv_cells(cell.ours),
                    f"{paper.mean:.2f}" if paper else "", csv_number(paper.deviation if paper else None),
                    {ABOVE: "above", BELOW: "below"}.get(cell.mark, ""),
                ]
            )  # fmt: skip
    return csv_table(CSV_HEADER, lines)


FORMATS: Mapping[str, Callable[[StudyTable], str]] = {"markdown": as_markdown, "latex": as_latex, "csv": as_csv}
