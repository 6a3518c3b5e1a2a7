"""The command ``fedfa report``: runs as one HTML page, with figures."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedfa.cli.common import say

if TYPE_CHECKING:
    from fedfa.experiment.recorded_runs import RecordedRun
    from fedfa.report.html.write import Report


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="DIRECTORY...", help="Run directories, or directories that hold some at any depth."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file. Default: report.html in the given directory; here if there are several."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Update the page while runs continue; a browser follows by itself.")
    ] = False,
    every: Annotated[int, typer.Option(min=1, metavar="SECONDS", help="Seconds between checks of --watch.")] = 10,
    target: Annotated[
        list[float] | None,
        typer.Option(min=0, max=100, metavar="PERCENT", help="Report the cost of reaching this accuracy; repeatable."),
    ] = None,
    figures: Annotated[bool, typer.Option(help="Also write the figures as SVG and PNG, beside the page.")] = True,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write TensorBoard event files to this directory.")
    ] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="URI", help="Also log to this MLflow server or store.")] = None,
) -> None:
    """Write one HTML page about runs, finished or not: curves, tables, data, classes, diagnostics, commands."""
    from fedfa.report.html.write import Reporter

    page = out or (paths[0] if len(paths) == 1 else Path()) / "report.html"
    if page.is_dir():
        page = page / "report.html"
    command = shlex.join(["fedfa", *sys.argv[1:]]) if sys.argv[1:2] == ["report"] else ""
    reporter = Reporter(paths, page, target or (), figures, command)
    if watch:
        say(f"watching; open {escape(str(page))} in a browser. Stop with Ctrl-C.")
        written = reporter.watch(every, _print_written)
    else:
        written = reporter.write()
    _print_written(written)
    if written.unfinished and not watch:
        say("[yellow]note:[/] with --watch, the page follows unfinished runs")
    for problem in written.problems:
        say(f"[yellow]note:[/] {escape(str(problem.path))}: {escape(problem.message)}")
    if written.figures:
        say(f"{len(written.figures)} figures in {escape(str(reporter.figure_directory))}")
    if tensorboard is not None or mlflow is not None:
        _export(reporter.runs(), tensorboard, mlflow)


def _print_written(written: Report) -> None:
    unfinished = f", {written.unfinished} not finished" if written.unfinished else ""
    runs = "1 run" if written.runs == 1 else f"{written.runs} runs"
    say(f"{runs}{unfinished}: {escape(str(written.page))}")


def _export(runs: list[RecordedRun], tensorboard: Path | None, mlflow: str | None) -> None:
    from fedfa.report.exports import export_mlflow, export_tensorboard

    if tensorboard is not None:
        values = export_tensorboard(runs, tensorboard)
        say(f"{values} values for: tensorboard --logdir {escape(str(tensorboard))}")
    if mlflow is not None:
        say(f"{export_mlflow(runs, mlflow)} runs logged to MLflow at {escape(mlflow)}")
