"""The demo: two runs side by side, a table, a picture."""

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
from fedfa.studies.compare import Cell, Comparison
from fedfa.studies.layers import merge
from fedfa.studies.settings import Settings, preset_layer

ROUNDS = {"fashion-mnist": 10, "digits": 30}
METHODS = {"FedAvg": "fedavg", "FedFA": "fedfa"}


def run_demo(console: Console, out: Path, *, rounds: int | None, fresh: bool, data_dir: Path | None) -> None:
    """Train FedAvg and FedFA, each in a process of its own, and show what came out."""
    started = time.perf_counter()
    if fresh:
        for title in METHODS.values():
            shutil.rmtree(out / title, ignore_errors=True)
    preset = _preset_for_available_data(console, data_dir)
    name = "fashion-mnist" if preset.startswith("fmnist") else "digits"
    rounds = ROUNDS[name] if rounds is None else rounds
    console.print(
        f"{name}, clients that hold two classes each, {rounds} rounds: FedAvg against FedFA, the same seed, the same "
        "clients, the same start."
    )
    base: dict[str, Any] = {**preset_layer(preset), "rounds": rounds}
    if data_dir is not None:
        base = merge(base, {"data": {"dir": str(data_dir)}})
    cells = [
        Cell(title, Settings.resolve(base, {"algorithm": {"recipe": recipe}}), out / recipe)
        for title, recipe in METHODS.items()
    ]
    if all(cell.finished() for cell in cells):
        console.print("Finished already: this is its record (--fresh trains again).")
    else:
        _train(console, cells)
    _show(console, {cell.title: cell.folder for cell in cells}, out, time.perf_counter() - started)


def _preset_for_available_data(console: Console, data_dir: Path | None) -> str:
    from fedfa.data import load

    try:
        with console.status("getting Fashion-MNIST"):
            load("fashion-mnist", data_dir=data_dir)
    except DataError as error:
        reason = str(error).partition("\n")[0]
        console.print(f"Fashion-MNIST cannot be had ({escape(reason)}); using scikit-learn's digits.", soft_wrap=True)
        return "digits-c2"
    return "fmnist-c2"


def _train(console: Console, cells: list[Cell]) -> None:
    with RoundsProgress(console) as progress:
        watchers = {cell.title: progress.add(cell.title, cell.settings.rounds) for cell in cells}
        work = Comparison(cells, len(cells), lambda cell, record: watchers[cell.title](record), stop_at_failure=True)
        progress.during(work.run)
    if work.failed:
        reasons = "; ".join(f"{name} failed: {reason}" for name, reason in work.failed.items())
        raise FedfaError(f"{reasons}\nTo begin anew: fedfa demo --fresh")


def _show(console: Console, folders: dict[str, Path], out: Path, seconds: float) -> None:
    from fedfa.report.curves import accuracy_curves
    from fedfa.studies.folder import RunFolder

    table = Table("method", "final accuracy", "best", "training time", "bytes moved")
    for title, folder in folders.items():
        summary = RunFolder(folder).summary()
        assert summary is not None
        moved = (summary["bytes_up"] + summary["bytes_down"]) / 1e6
        table.add_row(
            title, f"{summary['final_accuracy']:.2%}", f"{summary['best_accuracy']:.2%}",
            f"{summary['seconds']:.0f} s", f"{moved:.1f} MB",
        )  # fmt: skip
    console.print(table)
    try:
        picture = accuracy_curves({t: RunFolder(f).metrics() for t, f in folders.items()}, out / "accuracy.png")
        console.print(f"{seconds:.0f} s in all. Records and curves: {escape(str(picture))}", soft_wrap=True)
    except FedfaError as error:
        console.print(f"{seconds:.0f} s in all. Records in {escape(str(out))}. {escape(str(error))}", soft_wrap=True)
