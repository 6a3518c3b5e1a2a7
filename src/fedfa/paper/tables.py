"""A study's table: ours beside the paper's, with the seeds behind each number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedfa.paper.cells import Key, Place, places
from fedfa.paper.declare import Column, Row, Study, readings, studies
from fedfa.paper.found import Found, Measure, Runs
from fedfa.paper.numbers import Published, published, source
from fedfa.seed_means import MEANING, SeedMean, csv_cells, csv_number
from fedfa.text_tables import csv_table, latex_table, latex_text, markdown_table

ABOVE, BELOW = "▲", "▼"


@dataclass(frozen=True)
class Ours(SeedMean):
    """Our number in a cell, in percent."""

    @classmethod
    def of(cls, runs: Sequence[Found], measure: Measure = "final") -> Ours | None:
        """From finished runs of one cell and one length, one per seed."""
        return cls.over({run.seed: run.value(measure) for run in runs})


@dataclass(frozen=True)
class TableCell:
    """Ours and the paper's."""

    ours: Ours | None
    paper: Published | None

    @property
    def mark(self) -> str:
        """A sign if ours lies outside the paper's mean ± two of its standard deviations; else nothing."""
        if self.ours is None or self.paper is None or self.paper.deviation is None:
            return ""
        away = round(self.ours.mean - self.paper.mean, 6)
        if abs(away) <= round(2 * self.paper.deviation, 6):
            return ""
        return ABOVE if away > 0 else BELOW

    @property
    def ours_text(self) -> str:
        """Ours with its mark, or a dash."""
        return "–" if self.ours is None else f"{self.ours}{f' {self.mark}' if self.mark else ''}"

    @property
    def paper_text(self) -> str:
        """The paper's, or a dash."""
        return "–" if self.paper is None else str(self.paper)


@dataclass(frozen=True)
class TableRow:
    """One row: a method under one reading, all its runs of one length."""

    row: Row
    reading: str
    rounds: int
    cells: Mapping[str, TableCell | None]
    """By column; None where the paper has no such cell."""

    @property
    def title(self) -> str:
        """The row's title; with its reading where that is not the first, and its rounds where they are fewer."""
        first = self.reading == next(iter(readings()))
        return self.row.title + ("" if first else f" · {readings()[self.reading].title}")


@dataclass(frozen=True)
class StudyTable:
    """The whole table."""

    study: Study
    rows: Sequence[TableRow]
    measure: Measure
    """What ours is; the paper's is always the accuracy after the last round."""

    def groups(self) -> dict[str, list[Column]]:
        """Columns by group, as declared."""
        groups: dict[str, list[Column]] = {}
        for column in self.study.columns:
            groups.setdefault(column.group, []).append(column)
        return groups

    def rows_of(self, columns: Sequence[Column]) -> list[TableRow]:
        """The rows that have something to show in some columns: what was run, and what the paper has of its kind."""
        alike = self.measure == "final"  # beside another measure the paper's numbers alone say nothing

        def shows(cell: TableCell | None) -> bool:
            return cell is not None and (cell.ours is not None or (alike and cell.paper is not None))

        return [row for row in self.rows if any(shows(row.cells[column.name]) for column in columns)]


def numbers_by_key() -> dict[Key, tuple[int, Published]]:
    """What the paper has for a run, with the number of rounds; of the first of its tables that has it.

    Not for runs with this project's own defaults: they are not meant to be the paper's.
    """
    found: dict[Key, tuple[int, Published]] = {}
    for declared in studies().values():
        for place in places(declared) if declared.kind == "table" else []:
            number = published(declared.name, place.column.name, place.row.name)
            if number is not None and place.reading != "default":
                found.setdefault(place.key, (declared.rounds, number))
    return found


def study_table(study: Study, runs: Runs, measure: Measure = "final") -> StudyTable:
    """Ours beside the paper's.

    First the rows under the reading that stands beside the paper's numbers, at the paper's length; then, where they
    were run, the other readings; then runs of fewer rounds. Runs of different lengths never share a cell.
    """
    names = list(readings())
    grid = {
        (row.name, name): {c.name: Place(study, c, row, name) for c in study.columns if row in study.rows_of(c)}
        for row in study.rows for name in names
    }  # fmt: skip
    lengths = {length for places in grid.values() for place in places.values() for length in runs.lengths(place)}
    shorter_ones = sorted((length for length in lengths if length < study.rounds), reverse=True)

    def made(row: Row, reading: str, rounds: int) -> TableRow:
        places = grid[row.name, reading]
        ours = {column: Ours.of(runs.finished(place, rounds), measure) for column, place in places.items()}
        return _row(row, reading, rounds, ours, study)

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


def _row(row: Row, reading: str, rounds: int, ours: Mapping[str, Ours | None], study: Study) -> TableRow:
    cells: dict[str, TableCell | None] = {column.name: None for column in study.columns}
    for column, own in ours.items():
        shown = rounds == study.rounds and (own is not None or reading == next(iter(readings())))
        cells[column] = TableCell(own, published(study.name, column, row.name) if shown else None)
    return TableRow(row, reading, rounds, cells)


def legend(table: StudyTable) -> list[str]:
    """What the numbers mean, in sentences."""
    study = table.study
    first = next(iter(readings().values()))
    what = f"after the last of {study.rounds} rounds"
    if table.measure == "last10":
        what = f"as the mean of the last ten evaluations of {study.rounds} rounds (the paper's is after the last one)"
    lines = [
        f"Ours: accuracy in percent {what}, {MEANING}. Rows without a remark: {first.words}.",
    ]
    if source(study.name):
        lines.append(
            f"The paper: its {source(study.name)}, mean(standard deviation) of three trials where it gives one. "
            f"{ABOVE} and {BELOW}: our mean is above or below the paper's by more than two of its standard deviations."
        )
    shown = {row.reading for row in table.rows} - {next(iter(readings()))}
    lines += [f"{one.title}: {one.words}." for name, one in readings().items() if name in shown]
    return [*lines, *([study.note] if study.note else [])]


def _blocks(table: StudyTable) -> list[tuple[str, list[str], list[list[str]]]]:
    """Per group of columns and length of runs: a caption, a header, rows; ours and the paper's side by side."""
    blocks = []
    for group, columns in table.groups().items():
        rows = table.rows_of(columns)
        for rounds in dict.fromkeys(row.rounds for row in rows):
            full = rounds == table.study.rounds
            header, lines = ["method"], []
            for column in columns:
                header += [column.title, "the paper"] if full else [column.title]
            for row in (row for row in rows if row.rounds == rounds):
                line = [row.title]
                for column in columns:
                    cell = row.cells[column.name]
                    texts = ("", "") if cell is None else (cell.ours_text, cell.paper_text)
                    line += texts if full else texts[:1]
                lines.append(line)
            remark = "" if full else f", only {rounds} of the paper's {table.study.rounds} rounds"
            blocks.append((f"{group}{remark}", header, lines))
    return blocks


def as_markdown(table: StudyTable) -> str:
    """The table in Markdown, one part per data set and length of runs."""
    blocks = [f"**{caption}**\n\n{markdown_table(header, rows)}" for caption, header, rows in _blocks(table)]
    return "\n\n".join([*blocks, *legend(table)])


def as_latex(table: StudyTable) -> str:
    """The table in LaTeX, one tabular per data set and length of runs."""
    blocks = [f"% {caption}\n{latex_table(header, rows)}" for caption, header, rows in _blocks(table)]
    return "\n\n".join([*blocks, *(f"% {line}" for line in map(latex_text, legend(table)))])


CSV_HEADER = (
    "study", "cell", "reading", "rounds", "paper rounds", "seeds", "ours mean", "ours std", "paper mean", "paper std",
    "outside two std",
)  # fmt: skip


def as_csv(table: StudyTable) -> str:
    """One line per cell that has a number."""
    lines = []
    for row in table.rows:
        for column, cell in row.cells.items():
            if cell is None or (cell.ours is None and cell.paper is None):
                continue
            ours, paper = cell.ours, cell.paper
            lines.append(
                [
                    table.study.name, f"{column}/{row.row.name}", row.reading, str(row.rounds), str(table.study.rounds),
                    *csv_cells(ours),
                    f"{paper.mean:.2f}" if paper else "", csv_number(paper.deviation if paper else None),
                    {ABOVE: "above", BELOW: "below"}.get(cell.mark, ""),
                ]
            )  # fmt: skip
    return csv_table(CSV_HEADER, lines)


FORMATS: Mapping[str, Callable[[StudyTable], str]] = {"markdown": as_markdown, "latex": as_latex, "csv": as_csv}
