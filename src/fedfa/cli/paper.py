"""`fedfa paper`: the paper's tables and figures. Heavy imports happen inside the commands."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedfa.errors import DataError, FedfaError, RunError, SettingsError

if TYPE_CHECKING:
    from fedfa.paper.cells import StudyCell
    from fedfa.paper.declare import Study
    from fedfa.paper.found import Runs
    from fedfa.paper.tables import StudyTable

app = typer.Typer(no_args_is_help=True)
console = Console()
errors = Console(stderr=True)

OUT = Path("runs/paper")
Name = Annotated[str, typer.Argument(help="A table or figure; `fedfa paper list` lists them.")]
Results = Annotated[
    list[Path] | None,
    typer.Option(help=f"A folder with runs, at any depth; repeat it. Left out: results and {OUT}."),
]
Out = Annotated[Path, typer.Option(help="The folder for new runs.")]


@app.callback()
def paper() -> None:
    """The paper's tables and figures: run what is missing, ours beside the paper's."""


@app.command(name="list")
def list_(
    name: Annotated[str | None, typer.Argument(help="One of them, with its cells.")] = None, results: Results = None
) -> None:
    """List the tables and figures with their cells and what has been run."""
    from fedfa.paper.cells import places
    from fedfa.paper.declare import readings, studies, study

    runs = _runs(results)
    first = next(iter(readings()))
    if name is None:
        table = Table(box=None, pad_edge=False)
        table.add_column("name", no_wrap=True)
        for title in ("what it is", "rounds", "cells", "run", "with all seeds"):
            table.add_column(title)
        for one in studies().values():
            found = [runs.finished(place, one.rounds) for place in places(one, first)]
            whole = sum({run.seed for run in cell} >= set(one.seeds) for cell in found)
            begun = sum(bool(cell) for cell in found)
            table.add_row(one.name, one.title, str(one.rounds), str(len(found)), str(begun), str(whole))
        console.print(table)
        console.print("\nfedfa paper list NAME shows the cells; fedfa paper run NAME runs what is missing.")
        return
    one = study(name)
    table = Table("cell", "reading", "seeds run", "other lengths", box=None, pad_edge=False)
    for place in places(one):
        seeds = [str(run.seed) for run in runs.finished(place, one.rounds)]
        other = [
            f"{length} rounds: {', '.join(str(run.seed) for run in runs.finished(place, length))}"
            for length in runs.lengths(place) if length != one.rounds
        ]  # fmt: skip
        unfinished = [run for run in runs.of(place) if run.summary is None]
        other += [f"begun: seed {run.seed}" for run in unfinished]
        if place.reading == first or seeds or other:
            table.add_row(place.name, place.reading, ", ".join(seeds) or "–", "; ".join(other))
    console.print(f"[bold]{one.name}[/]: {escape(one.title)}, {one.rounds} rounds", highlight=False)
    console.print(table)


@app.command()
def run(
    name: Name,
    cells: Annotated[
        list[str] | None, typer.Option(help="Only these, e.g. 'fmnist/c2/*' or '*/fedfa'; repeat it for more.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="1,2,3", help="Left out: those of the study.")] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop after so long (2h, 90m, 45s); the next call goes on.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; left out, one per core.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Fewer than the paper's; such runs are labelled and never mixed.")
    ] = None,
    reading: Annotated[
        str | None, typer.Option(help="How the paper is read: authors (its published code), paper (its text), default.")
    ] = None,
    results: Results = None,
    out: Out = OUT,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are kept.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be run, in which order.")] = False,
) -> None:
    """Run what is missing of a table or figure, what tells most first. Goes on where it was stopped."""
    from fedfa.paper.declare import reading as known_reading
    from fedfa.paper.declare import readings, study
    from fedfa.paper.plan import missing

    chosen = study(name)
    asked = reading or next(iter(readings()))
    known_reading(asked)
    seconds = None if budget is None else parse_duration(budget)
    found = _runs(results, out)
    missing_cells = missing(
        chosen, found, out, patterns=cells or [], seeds=_seeds(seeds), rounds=rounds, reading=asked, data_dir=data_dir
    )
    if not missing_cells:
        console.print(f"nothing is missing; fedfa paper {chosen.kind} {name} shows what came of it")
        return
    shorter = (
        "" if rounds is None or rounds == chosen.rounds else f" of only {rounds} rounds (the paper: {chosen.rounds})"
    )
    many = "1 run{} is missing" if len(missing_cells) == 1 else f"{len(missing_cells)} runs{{}} are missing"
    console.print(many.format(shorter), highlight=False)
    if plan:
        for number, cell in enumerate(missing_cells, 1):
            console.print(f"{number:4}. {escape(cell.name)}  {escape(str(cell.folder))}", highlight=False)
        return
    _run_cells(missing_cells, jobs, seconds)


@app.command()
def table(
    name: Name,
    results: Results = None,
    form: Annotated[str, typer.Option("--format", help="terminal, markdown, latex or csv.")] = "terminal",
    last10: Annotated[
        bool, typer.Option("--last10", help="Ours as the mean of the last ten evaluations, which swings less.")
    ] = False,
) -> None:
    """Print ours and the paper's side by side."""
    from fedfa.messages import nearest
    from fedfa.paper.declare import study
    from fedfa.paper.tables import FORMATS, study_table

    if form not in ("terminal", *FORMATS):
        known = ["terminal", *FORMATS]
        raise SettingsError(f"--format {form!r}{nearest(form, known)}: one of {', '.join(known)}")
    runs = _runs(results)
    made = study_table(study(name), runs, "last10" if last10 else "final")
    if not any(made.rows_of(columns) for columns in made.groups().values()):
        raise RunError(f"no run of {name} is finished, and the paper gives no numbers; first: fedfa paper run {name}")
    if form == "terminal":
        _print_table(made)
        if made.study.looks_inside:
            _print_inside(made.study, runs)
    else:
        typer.echo(FORMATS[form](made))


@app.command()
def figure(
    name: Name,
    results: Results = None,
    to: Annotated[Path, typer.Option(help="The folder for the pictures.")] = OUT / "figures",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Draw runs of so many rounds, fewer than the paper's.")
    ] = None,
    reading: Annotated[str | None, typer.Option(help="How the paper is read: authors, paper, default.")] = None,
) -> None:
    """Draw a figure as SVG and PNG from what has been run."""
    from fedfa.paper.declare import readings, study
    from fedfa.paper.figures import Shown, draw_figure

    chosen = study(name)
    if chosen.picture is None:
        raise SettingsError(f"{name} is a table: fedfa paper table {name}")
    shown = Shown.of(chosen, _runs(results), reading or next(iter(readings())), rounds)
    shorter = "" if shown.rounds == chosen.rounds else f"-r{shown.rounds}"
    paths = [to / f"{name}{shorter}{ending}" for ending in (".svg", ".png")]
    draw_figure(shown, paths)
    console.print(f"drawn: {', '.join(escape(str(path)) for path in paths)}", soft_wrap=True)
    if left := shown.missing():
        console.print(f"not run, so not in it: {escape(', '.join(left))}", soft_wrap=True)


def parse_duration(text: str) -> float:
    """``2h``, ``90m``, ``1h30m`` or ``45s`` in seconds.

    Example:
        >>> parse_duration("1h30m")
        5400.0
    """
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    pieces = re.findall(r"(\d+(?:\.\d+)?)([hms])", text.strip())
    if not pieces or "".join(number + unit for number, unit in pieces) != text.strip():
        raise SettingsError(f"--budget {text!r}: write a time such as 2h, 90m, 1h30m or 45s")
    return sum(float(number) * units[unit] for number, unit in pieces)


def _seeds(text: str | None) -> list[int]:
    try:
        return [] if text is None else list(dict.fromkeys(int(piece) for piece in text.split(",")))
    except ValueError:
        raise SettingsError(f"--seeds {text!r}: write numbers with commas between them, e.g. 1,2,3") from None


def _default_results() -> list[Path]:
    return [Path("results"), OUT]


def _runs(folders: Sequence[Path] | None, out: Path | None = None) -> Runs:
    from fedfa.paper.found import Runs

    if missing := [folder for folder in folders or [] if not folder.is_dir()]:
        raise SettingsError(f"--results {missing[0]}: there is no such folder")
    runs = Runs.below([*(folders or _default_results()), *([] if out is None else [out])])
    for folder, reason in runs.unreadable.items():
        errors.print(f"passed over: {escape(str(folder))} ({escape(reason)})", soft_wrap=True)
    return runs


def _run_cells(cells: Sequence[StudyCell], jobs: int | None, seconds: float | None) -> None:
    from fedfa.cli.progress import RoundsProgress
    from fedfa.studies.compare import Comparison

    cells = _with_data(cells)
    with RoundsProgress(console) as progress:
        work = Comparison(cells, jobs, progress.watch, seconds=seconds)
        progress.during(work.run)
    for busy in work.busy:
        console.print(f"left alone: {escape(busy)}, another process is working on it", soft_wrap=True)
    if work.out_of_time:
        done = sum(1 for cell in cells if (cell.folder / "summary.json").exists())
        console.print(
            f"the time is over: {done} of {len(cells)} runs are finished. The same command goes on from here."
        )
    if work.failed:
        raise FedfaError("\n".join(f"{name}: {reason}" for name, reason in work.failed.items()))


def _with_data(cells: Sequence[StudyCell]) -> list[StudyCell]:
    """The cells whose data are here or can be fetched (once, before several processes ask for them)."""
    from fedfa.studies.setup import load_dataset

    lacking: dict[str, str] = {}
    for name, settings in {cell.settings.data.name: cell.settings for cell in cells}.items():
        try:
            with console.status(f"getting {escape(name)}"):
                load_dataset(settings)
        except DataError as error:
            lacking[name] = str(error)
    left = [cell for cell in cells if cell.settings.data.name not in lacking]
    counts = Counter(cell.settings.data.name for cell in cells)
    words = [f"{counts[name]} runs are left out for lack of data: {reason}" for name, reason in lacking.items()]
    if not left:
        raise DataError("\n".join(words))
    for line in words:
        errors.print(escape(line), soft_wrap=True)
    return left


def _print_table(made: StudyTable) -> None:
    from fedfa.paper.tables import legend

    console.print(
        f"[bold]{made.study.name}[/]: {escape(made.study.title)}. Ours, below it the paper's.", highlight=False
    )
    for group, columns in made.groups().items():
        rows = made.rows_of(columns)
        for rounds in dict.fromkeys(row.rounds for row in rows):
            full = rounds == made.study.rounds
            remark = "" if full else f" – only {rounds} of the paper's {made.study.rounds} rounds"
            shown = Table(title=f"{group}{remark}", title_justify="left", box=None, pad_edge=False)
            shown.add_column("method")
            for column in columns:
                shown.add_column(column.title, justify="right", no_wrap=True)
            for row in (row for row in rows if row.rounds == rounds):
                texts = []
                for column in columns:
                    cell = row.cells[column.name]
                    ours = "" if cell is None else cell.ours_text
                    texts.append(escape(f"{ours}\n{cell.paper_text}" if full and cell is not None else ours))
                shown.add_row(escape(row.title), *texts)
            console.print(shown)
            console.print()
    for line in legend(made):
        console.print(escape(line), style="dim", highlight=False)


def _print_inside(chosen: Study, runs: Runs) -> None:
    from fedfa.paper.declare import readings
    from fedfa.paper.figures import Shown
    from fedfa.paper.inside import inside_tables

    for column, header, rows in inside_tables(Shown.of(chosen, runs, next(iter(readings())))):
        shown = Table(title=escape(column.title), title_justify="left", box=None, pad_edge=False)
        for number, name in enumerate(header):
            shown.add_column(escape(name), justify="right" if number else "left")
        for row in rows:
            shown.add_row(*map(escape, row))
        console.print()
        console.print(shown)
