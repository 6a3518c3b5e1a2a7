"""The command ``fedfa paper``: the paper's tables and figures. Heavy imports happen inside the functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedfa.cli.common import DataDir, Jobs, console, errors, parse_seeds, plain_table, say
from fedfa.errors import ConfigError, DataError, FedfaError, RunError

if TYPE_CHECKING:
    from fedfa.paper.cells import StudyCell
    from fedfa.paper.declarations import Study
    from fedfa.paper.run_index import RunIndex
    from fedfa.paper.tables import StudyTable

app = typer.Typer(no_args_is_help=True)
OUT = Path("runs/paper")
Name = Annotated[str, typer.Argument(help="Name of a table or figure; see `fedfa paper list`.")]
Results = Annotated[
    list[Path] | None, typer.Option(help=f"Directory with runs, at any depth; repeatable. Default: results and {OUT}.")
]


@app.callback()
def paper() -> None:
    """Reproduce the paper's tables and figures: run what is missing, compare with the paper's numbers."""


@app.command(name="list")
def list_(
    name: Annotated[str | None, typer.Argument(help="Show the cells of this one.")] = None, results: Results = None
) -> None:
    """List the tables and figures, their cells and the existing runs."""
    from fedfa.paper.cells import places
    from fedfa.paper.data_figure import DATA_FIGURES
    from fedfa.paper.declarations import main_reading, studies, study

    runs = _runs(results)
    if name is None:
        table = Table("name", "what it is", "rounds", "cells", "run", "with all seeds", box=None, pad_edge=False)
        table.columns[0].no_wrap = True
        for one in studies().values():
            found = [runs.finished(place, one.rounds) for place in places(one, main_reading())]
            whole = sum({run.seed for run in cell} >= set(one.seeds) for cell in found)
            started = sum(bool(cell) for cell in found)
            table.add_row(one.name, one.title, str(one.rounds), str(len(found)), str(started), str(whole))
        console.print(table)
        console.print("\nfedfa paper list NAME lists the cells; fedfa paper run NAME runs what is missing.")
        for figure_name, title in DATA_FIGURES.items():
            console.print(f"fedfa paper figure {figure_name} needs no run: {title}.", highlight=False)
        return
    one = study(name)
    table = Table("cell", "reading", "seeds run", "other lengths", box=None, pad_edge=False)
    for place in places(one):
        seeds = [str(run.seed) for run in runs.finished(place, one.rounds)]
        other = [
            f"{length} rounds: {', '.join(str(run.seed) for run in runs.finished(place, length))}"
            for length in runs.lengths(place) if length != one.rounds
        ]  # fmt: skip
        other += [f"unfinished: seed {run.seed}" for run in runs.of(place) if not run.finished]
        if place.reading == main_reading() or seeds or other:
            table.add_row(place.name, place.reading, ", ".join(seeds) or "–", "; ".join(other))
    console.print(f"[bold]{one.name}[/]: {escape(one.title)}, {one.rounds} rounds", highlight=False)
    console.print(table)


@app.command()
def run(
    name: Name,
    cells: Annotated[
        list[str] | None, typer.Option(help="Only cells that match, e.g. 'fmnist/c2/*' or '*/fedfa'; repeatable.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", "--seed", metavar="1,2,3", help="Default: the seeds of the study.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Stop after this time (2h, 90m, 45s); the same command continues."),
    ] = None,
    jobs: Jobs = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Fewer rounds than the paper; such runs are labelled and kept apart.")
    ] = None,
    reading: Annotated[
        str | None, typer.Option(help="Reading of the paper: authors (its published code), paper (its text), default.")
    ] = None,
    results: Results = None,
    out: Annotated[Path, typer.Option(help="Directory for new runs.")] = OUT,
    data_dir: DataDir = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only list what would run, in order.")] = False,
) -> None:
    """Run the missing cells of a table or figure, most informative first. Continues where it stopped."""
    from fedfa.paper.declarations import main_reading, study
    from fedfa.paper.declarations import reading as known_reading
    from fedfa.paper.plan import missing

    chosen = study(name)
    asked = reading or main_reading()
    known_reading(asked)
    seconds = None if budget is None else parse_duration(budget)
    found = _runs(results, out)
    wanted = parse_seeds([seeds] if seeds else None, "--seeds")
    missing_cells = missing(
        chosen, found, out, patterns=cells or [], seeds=wanted, rounds=rounds, reading=asked, data_dir=data_dir
    )
    if not missing_cells:
        console.print(f"nothing is missing; see the result with: fedfa paper {chosen.kind} {name}")
        return
    shorter = "" if rounds in (None, chosen.rounds) else f" of only {rounds} rounds (the paper: {chosen.rounds})"
    many = "1 run{} is missing" if len(missing_cells) == 1 else f"{len(missing_cells)} runs{{}} are missing"
    console.print(many.format(shorter), highlight=False)
    if plan:
        for number, cell in enumerate(missing_cells, 1):
            console.print(f"{number:4}. {escape(cell.name)}  {escape(str(cell.directory))}", highlight=False)
        return
    _run_cells(missing_cells, jobs, seconds)


@app.command()
def table(
    name: Name,
    results: Results = None,
    form: Annotated[str, typer.Option("--format", help="terminal, markdown, latex or csv.")] = "terminal",
    last10: Annotated[
        bool, typer.Option("--last10", help="Show our mean of the last ten evaluations, which fluctuates less.")
    ] = False,
) -> None:
    """Print our numbers and the paper's side by side."""
    from fedfa.error_messages import nearest
    from fedfa.paper.declarations import study
    from fedfa.paper.tables import FORMATS, study_table

    if form not in (known := ["terminal", *FORMATS]):
        raise ConfigError(f"--format {form!r}{nearest(form, known)}: one of {', '.join(known)}")
    runs = _runs(results)
    made = study_table(study(name), runs, "last10" if last10 else "final")
    if not made.blocks():
        raise RunError(f"no run of {name} is finished, and the paper gives no numbers; first: fedfa paper run {name}")
    if form == "terminal":
        _print_table(made)
        if made.study.needs_diagnostics:
            _print_diagnostics(made.study, runs)
    else:
        typer.echo(FORMATS[form](made))


@app.command()
def figure(
    name: Name,
    results: Results = None,
    to: Annotated[Path, typer.Option(help="Directory for the figures.")] = OUT / "figures",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Draw runs of this many rounds, fewer than the paper's.")
    ] = None,
    reading: Annotated[str | None, typer.Option(help="Reading of the paper: authors, paper, default.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Data directory, for figures of data.")] = None,
) -> None:
    """Draw a figure as SVG and PNG from existing runs; a figure of data (mixed-digits) needs none."""
    from fedfa.paper.data_figure import DATA_FIGURES, draw_data_figure
    from fedfa.paper.declarations import main_reading, study
    from fedfa.paper.figures import FigureRuns, draw_figure

    if name in DATA_FIGURES:
        from fedfa.data import load

        paths = [to / f"{name}{ending}" for ending in (".svg", ".png")]
        draw_data_figure(load(name, data_dir=data_dir), paths)
        console.print(f"written: {', '.join(escape(str(path)) for path in paths)}", soft_wrap=True)
        return
    chosen = study(name)
    if chosen.picture is None:
        raise ConfigError(f"{name} is a table: fedfa paper table {name}")
    shown = FigureRuns.of(chosen, _runs(results), reading or main_reading(), rounds)
    shorter = "" if shown.rounds == chosen.rounds else f"-r{shown.rounds}"
    paths = [to / f"{name}{shorter}{ending}" for ending in (".svg", ".png")]
    draw_figure(shown, paths)
    say(f"written: {', '.join(escape(str(path)) for path in paths)}")
    if left := shown.missing():
        say(f"not shown because not run: {escape(', '.join(left))}")


def parse_duration(text: str) -> float:
    """Convert ``2h``, ``90m``, ``1h30m`` or ``45s`` to seconds.

    Example:
        >>> parse_duration("1h30m")
        5400.0
    """
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    pieces = re.findall(r"(\d+(?:\.\d+)?)([hms])", text.strip())
    if not pieces or "".join(number + unit for number, unit in pieces) != text.strip():
        raise ConfigError(f"--budget {text!r} is not a time; write one such as 2h, 90m, 1h30m or 45s")
    return sum(float(number) * units[unit] for number, unit in pieces)


def _runs(results: Sequence[Path] | None, out: Path | None = None) -> RunIndex:
    from fedfa.paper.run_index import RunIndex

    if missing := [path for path in results or [] if not path.is_dir()]:
        raise ConfigError(f"--results {missing[0]}: no such directory")
    runs = RunIndex.below([*(results or [Path("results"), OUT]), *([] if out is None else [out])])
    for path, reason in runs.unreadable.items():
        errors.print(f"skipped: {escape(str(path))} ({escape(reason)})", soft_wrap=True)
    return runs


def _run_cells(cells: Sequence[StudyCell], jobs: int | None, seconds: float | None) -> None:
    from fedfa.cli.progress import RoundsProgress
    from fedfa.experiment.sweep import Comparison

    cells = _with_data(cells)
    with RoundsProgress(console) as progress:
        work = Comparison(cells, jobs, progress.watch, seconds=seconds, count=progress.count)
        progress.during(work.run)
    for busy in work.busy:
        say(f"skipped: {escape(busy)}, another process is running it")
    if work.out_of_time:
        done = sum(1 for cell in cells if (cell.directory / "summary.json").exists())
        console.print(f"time is up: {done} of {len(cells)} runs are finished. The same command continues.")
    if work.failed:
        raise FedfaError("\n".join(f"{name}: {reason}" for name, reason in work.failed.items()))


def _with_data(cells: Sequence[StudyCell]) -> list[StudyCell]:
    """The cells whose data can be loaded; downloads them once, before several processes need them."""
    from fedfa.experiment.build import load_dataset

    lacking: dict[str, str] = {}
    for name, config in {cell.config.data.name: cell.config for cell in cells}.items():
        try:
            with console.status(f"loading {escape(name)}"):
                load_dataset(config)
        except DataError as error:
            lacking[name] = str(error)
    left = [cell for cell in cells if cell.config.data.name not in lacking]
    counts = Counter(cell.config.data.name for cell in cells)
    lines = [f"{counts[name]} runs are left out because data are missing: {reason}" for name, reason in lacking.items()]
    if not left:
        raise DataError("\n".join(lines))
    for line in lines:
        errors.print(escape(line), soft_wrap=True)
    return left


def _print_table(made: StudyTable) -> None:
    from fedfa.paper.tables import legend

    title = f"[bold]{made.study.name}[/]: {escape(made.study.title)}. Our numbers, below them the paper's."
    console.print(title, highlight=False)
    for block in made.blocks():
        rows = []
        for row in block.rows:
            cells = [row.cells[column.name] for column in block.columns]
            texts = [c and (f"{c.ours_text}\n{c.paper_text}" if block.full else c.ours_text) for c in cells]
            rows.append([row.title, *(text or "" for text in texts)])
        shown = plain_table(["method", *(column.title for column in block.columns)], rows, title=block.caption)
        for number in shown.columns[1:]:
            number.no_wrap = True
        console.print(shown)
        console.print()
    for line in legend(made):
        console.print(escape(line), style="dim", highlight=False)


def _print_diagnostics(chosen: Study, runs: RunIndex) -> None:
    from fedfa.paper.declarations import main_reading
    from fedfa.paper.diagnostics_tables import diagnostics_tables
    from fedfa.paper.figures import FigureRuns

    for column, header, rows in diagnostics_tables(FigureRuns.of(chosen, runs, main_reading())):
        console.print()
        console.print(plain_table(header, rows, title=column.title))
