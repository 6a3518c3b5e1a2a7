"""The demo: two runs side by side, a table, a picture."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedfa.cli.progress import RoundsProgress
from fedfa.errors import DataError, FedfaError

ROUNDS = {"fashion-mnist": 10, "digits": 30}
METHODS = {"FedAvg": "fedavg", "FedFA": "fedfa"}


def run_demo(console: Console, out: Path, *, rounds: int | None, fresh: bool, data_dir: Path | None) -> None:
    """Train FedAvg and FedFA, each in a process of its own, and show what came out."""
    started = time.perf_counter()
    if fresh:
        for title in METHODS:
            shutil.rmtree(out / title.lower(), ignore_errors=True)
    preset = _preset_for_available_data(console, data_dir)
    name = "fashion-mnist" if preset.startswith("fmnist") else "digits"
    rounds = rounds or ROUNDS[name]
    console.print(
        f"{name}, clients that hold two classes each, {rounds} rounds: FedAvg against FedFA, the same seed, the same "
        "clients, the same start."
    )
    folders = {title: out / title.lower() for title in METHODS}
    if all(_finished(folder, preset, METHODS[title], rounds) for title, folder in folders.items()):
        console.print("Finished already: this is its record (--fresh trains again).")
    else:
        _train(console, folders, preset, rounds, data_dir)
    _show(console, folders, out, time.perf_counter() - started)


def _finished(folder: Path, preset: str, method: str, rounds: int) -> bool:
    """Whether the folder holds the finished record of exactly the run that the demo would make."""
    from fedfa.studies.folder import RunFolder
    from fedfa.studies.run import same_run
    from fedfa.studies.settings import Settings

    record = RunFolder(folder)
    if record.summary() is None:
        return False
    return same_run(record.settings(), Settings.preset(preset, {"rounds": rounds, "algorithm": {"recipe": method}}))


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


def _train(console: Console, folders: dict[str, Path], preset: str, rounds: int, data_dir: Path | None) -> None:
    """Two processes with one thread each: faster than one process with two threads, and the same result."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    logs = {title: folder.with_suffix(".log") for title, folder in folders.items()}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        with RoundsProgress(console) as progress:
            watchers = {}
            for title, folder in folders.items():
                folder.parent.mkdir(parents=True, exist_ok=True)
                command = [
                    sys.executable, "-m", "fedfa", "run", "--preset", preset, "--algorithm", METHODS[title],
                    "--rounds", str(rounds), "--out", str(folder), "--resume",
                ]  # fmt: skip
                command += ["--data-dir", str(data_dir)] if data_dir else []
                with logs[title].open("wb") as log:
                    processes[title] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                watchers[title] = progress.add(title, rounds)
            _watch(processes, folders, watchers)
    except BaseException:
        _end(processes)
        console.print("stopped. The same command goes on from here.")
        raise
    _end(processes)
    for title, process in processes.items():
        if process.returncode not in (0, -signal.SIGTERM, 143):
            said = logs[title].read_text(encoding="utf-8", errors="replace").strip()
            raise FedfaError(f"{title} failed: {said}\nTo begin anew: fedfa demo --fresh")


def _end(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    for process in processes.values():
        process.send_signal(signal.SIGTERM)
    for process in processes.values():
        process.wait()


def _watch(processes: dict[str, subprocess.Popen[bytes]], folders: dict[str, Path], watchers: dict[str, Any]) -> None:
    from fedfa.studies.folder import RunFolder

    shown = dict.fromkeys(folders, 0)
    running = True
    while running:
        codes = [process.poll() for process in processes.values()]
        running = None in codes and not any(codes)  # if one fails there is no point in waiting for the other
        for title, folder in folders.items():
            for record in RunFolder(folder).metrics():
                if record["round"] > shown[title]:
                    shown[title] = record["round"]
                    watchers[title](record)
        time.sleep(0.2 if running else 0)


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
