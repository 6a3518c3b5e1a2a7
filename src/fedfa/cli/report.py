"""`fedfa report`: run folders as one page, with figures."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from fedfa.report.html.reading import Run
    from fedfa.report.html.write import Report

console = Console()


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some at any depth.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; left out, report.html in the folder if it is one, else here.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write again while runs go on; the page in a browser follows by itself.")
    ] = False,
    every: Annotated[int, typer.Option(min=1, metavar="SECONDS", help="How often --watch looks.")] = 10,
    target: Annotated[
        list[float] | None,
        typer.Option(min=0, max=100, metavar="PERCENT", help="An accuracy whose costs are told; repeat it for more."),
    ] = None,
    figures: Annotated[bool, typer.Option(help="Also write the figures as SVG and PNG, beside the page.")] = True,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write TensorBoard's files here.")
    ] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="URI", help="Also log to this MLflow server or store.")] = None,
) -> None:
    """Write one HTML page about runs, finished or going on: curves, tables, split, classes, insight, commands."""
    from fedfa.report.html.write import Reporter

    place = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    if place.is_dir():
        place = place / "report.html"
    command = shlex.join(["fedfa", *sys.argv[1:]]) if sys.argv[1:2] == ["report"] else ""
    reporter = Reporter(folders, place, target or (), figures, command)
    if watch:
        console.print(f"watching; open {escape(str(place))} in a browser. Ctrl-C ends it.", soft_wrap=True)
        done = reporter.watch(every, _tell)
    else:
        done = reporter.write()
    _tell(done)
    if done.going and not watch:
        console.print("[yellow]note:[/] with --watch, the page follows runs that go on")
    for problem in done.problems:
        console.print(f"[yellow]note:[/] {escape(str(problem.path))}: {escape(problem.words)}", soft_wrap=True)
    if done.figures:
        console.print(f"{len(done.figures)} figures in {escape(str(reporter.figure_folder))}", soft_wrap=True)
    if tensorboard is not None or mlflow is not None:
        _export(reporter.runs(), tensorboard, mlflow)


def _tell(done: Report) -> None:
    going = f", {done.going} not finished" if done.going else ""
    runs = "1 run" if done.runs == 1 else f"{done.runs} runs"
    console.print(f"{runs}{going}: {escape(str(done.page))}", soft_wrap=True)


def _export(runs: list[Run], tensorboard: Path | None, mlflow: str | None) -> None:
    if tensorboard is not None:
        from fedfa.report.tensorboard import export_tensorboard

        values = export_tensorboard(runs, tensorboard)
        console.print(f"{values} values for: tensorboard --logdir {escape(str(tensorboard))}", soft_wrap=True)
    if mlflow is not None:
        from fedfa.report.mlflow import export_mlflow

        console.print(f"{export_mlflow(runs, mlflow)} runs logged to MLflow at {escape(mlflow)}", soft_wrap=True)
