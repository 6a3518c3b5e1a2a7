"""The command ``fedfa demo``: two runs side by side, a table and a chart."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedfa.cli.progress import RoundsProgress
from fedfa.errors import DataError, FedfaError
from fedfa.experiment.config import Config, preset_layer
from fedfa.experiment.layers import merge
from fedfa.experiment.sweep import Cell, Comparison

ROUNDS = {"fashion-mnist": 10, "digits": 30}
METHODS = {"FedAvg": "fedavg", "FedFA": "fedfa"}


def run_demo(console: Console, out: Path, *, rounds: int | None, fresh: bool, data_dir: Path | None) -> None:
    """Train FedAvg and FedFA in one process each, and show the results."""
    started = time.perf_counter()
    if fresh:
        for title in METHODS.values():
            shutil.rmtree(out / title, ignore_errors=True)
    preset = _preset_for_available_data(console, data_dir)
    name = "fashion-mnist" if preset.startswith("fmnist") else "digits"
    rounds = ROUNDS[name] if rounds is None else rounds
    console.print(
        f"{name}, two classes per client, {rounds} rounds: FedAvg and FedFA with the same seed, clients and initial "
        "weights."
    )
    base: dict[str, Any] = {**preset_layer(preset), "rounds": rounds}
    if data_dir is not None:
        base = merge(base, {"data": {"dir": str(data_dir)}})
    cells = [
        Cell(title, Config.resolve(base, {"algorithm": {"name": algorithm}}), out / algorithm)
        for title, algorithm in METHODS.items()
    ]
    if all(cell.finished() for cell in cells):
        console.print("Already finished: this is the recorded result (--fresh trains again).")
    else:
        _train(console, cells)
    _show(console, {cell.title: cell.directory for cell in cells}, out, time.perf_counter() - started)


def _preset_for_available_data(console: Console, data_dir: Path | None) -> str:
    from fedfa.data import load

    try:
        with console.status("loading Fashion-MNIST"):
            load("fashion-mnist", data_dir=data_dir)
    except DataError as error:
        reason = str(error).partition("\n")[0]
        console.print(
            f"Fashion-MNIST is not available ({escape(reason)}); using small digits instead.",
            soft_wrap=True,
        )
        return "digits-c2"
    return "fmnist-c2"


def _train(console: Console, cells: list[Cell]) -> None:
    with RoundsProgress(console) as progress:
        watchers = {cell.title: progress.add(cell.title, cell.config.rounds) for cell in cells}
        work = Comparison(cells, len(cells), lambda cell, record: watchers[cell.title](record), stop_at_failure=True)
        progress.during(work.run)
    if work.failed:
        reasons = "; ".join(f"{name} failed: {reason}" for name, reason in work.failed.items())
        raise FedfaError(f"{reasons}\nTo start again: fedfa demo --fresh")


def _show(console: Console, directories: dict[str, Path], out: Path, seconds: float) -> None:
    from fedfa.experiment.files import write_atomically
    from fedfa.experiment.recorded_runs import read_run
    from fedfa.report.html.chart import WIDE
    from fedfa.report.html.drawing import file_png
    from fedfa.report.html.line_charts import Axis, Series, line_chart
    from fedfa.report.html.palette import styles

    table = Table("method", "final accuracy", "best", "training time", "bytes moved")
    runs = {title: read_run(directory) for title, directory in directories.items()}
    for title, run in runs.items():
        found = run.results
        moved = (found["bytes_up"] + found["bytes_down"]) / 1e6
        table.add_row(
            title, f"{found['final_accuracy']:.2%}", f"{found['best_accuracy']:.2%}",
            f"{found['seconds']:.0f} s", f"{moved:.1f} MB",
        )  # fmt: skip
    console.print(table)
    method_styles = styles(METHODS.values())
    series = [
        Series(
            title,
            method_styles[METHODS[title]],
            [(record["round"], 100 * record["accuracy"]) for record in run.evaluated],
        )
        for title, run in runs.items()
    ]
    axes = Axis("round", low=0, whole=True), Axis("accuracy of the global model, %", low=0, high=100)
    try:
        write_atomically(out / "accuracy.png", file_png(line_chart(series, *axes, WIDE, 420)))
        written = f"Records and curves: {escape(str(out / 'accuracy.png'))}"
    except FedfaError as error:  # matplotlib is missing
        written = f"Records in {escape(str(out))}. {escape(str(error))}"
    console.print(f"{seconds:.0f} s in total. {written}", soft_wrap=True)
