"""Running a study: interrupted, continued, never repeated."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedfa.experiment.run import run
from fedfa.experiment.sweep import Cell, Comparison
from fedfa.paper.cells import StudyCell
from fedfa.paper.declarations import Study
from fedfa.paper.plan import missing
from fedfa.paper.run_index import RunIndex
from tests.paper.small_study import DECLARED, small_study

pytestmark = pytest.mark.system


def never(cell: Cell, record: dict[str, Any]) -> None:
    raise AssertionError(f"{cell.name} was run again")


def cells_of(study: Study, out: Path, data_dir: Path, *patterns: str) -> list[StudyCell]:
    return missing(
        study, RunIndex.below([out]), out, patterns=patterns, seeds=[1], reading="authors", data_dir=data_dir
    )


def test_study_runs_and_final_passes_are_added_without_training_again(tmp_path: Path, data_dir: Path) -> None:
    """FedAvg with CCVR waits for FedAvg and is made of it: the same rounds, the same bits as training anew.

    FedFA from its own anchors waits for FedFA, whose last state it starts from.
    """
    study = small_study()
    wanted = ("digits/c2/fedavg", "digits/c2/fedavg-ccvr", "digits/c2/fedfa", "digits/c2/ideal")
    cells = cells_of(study, tmp_path / "out", data_dir, *wanted)
    seen: list[tuple[str, int]] = []
    work = Comparison(cells, 2, lambda cell, record: seen.append((cell.name, record["round"])))
    work.run()
    assert work.failed == {}
    assert sorted(number for name, number in seen if name == "digits/c2/fedavg-ccvr seed 1") == [1, 2, 3, 4, 5]
    by_row = {cell.place.row.name: cell for cell in cells if cell.place is not None}
    added = [json.loads(line) for line in (by_row["fedavg-ccvr"].directory / "metrics.jsonl").read_text().splitlines()]
    trained = [json.loads(line) for line in (by_row["fedavg"].directory / "metrics.jsonl").read_text().splitlines()]
    assert added[:4] == trained, "also the seconds: the rounds were copied"
    assert added[4]["final_pass"]
    anew = run(by_row["fedavg-ccvr"].config, tmp_path / "anew")
    assert (
        anew.final_accuracy
        == json.loads((by_row["fedavg-ccvr"].directory / "summary.json").read_text())["final_accuracy"]
    )
    assert by_row["ideal"].config.algorithm.options["anchors"]["init"].endswith("fedfa-s1/server.safetensors")
    assert cells_of(study, tmp_path / "out", data_dir, *wanted) == [], "all are found again by their settings"
    Comparison(cells, 2, never).run()


def test_study_stops_cleanly_when_time_is_up_and_the_next_call_continues(tmp_path: Path, data_dir: Path) -> None:
    """A run of ten thousand rounds is stopped after some: its process is gone, its checkpoint is there, and the next
    call continues after it, in the same directory.
    """
    long = small_study(DECLARED.replace("rounds = 4", "rounds = 10000"))
    [cell] = cells_of(long, tmp_path, data_dir, "digits/c2/fedavg")
    seen: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def until_some_rounds_later(cell: Cell, record: dict[str, Any]) -> None:
        seen.append(record["round"])
        processes.extend(running.process.process for running in work._running.values())
        if record["round"] >= stop_at:
            work.seconds = 0.0

    stop_at = 3
    work = Comparison([cell], 1, until_some_rounds_later, seconds=600.0)
    work.run()
    assert work.out_of_time
    assert work.failed == {}
    assert all(process.poll() is not None for process in processes)
    assert (cell.directory / "checkpoint.safetensors").exists()
    assert not (cell.directory / "summary.json").exists()
    [planned] = cells_of(long, tmp_path, data_dir, "digits/c2/fedavg")
    assert planned.directory == cell.directory
    done = len((cell.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert done >= 3
    stop_at = done + 2
    work = Comparison([planned], 1, until_some_rounds_later, seconds=600.0)
    work.run()
    records = [json.loads(line) for line in (cell.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["round"] for record in records] == list(range(1, len(records) + 1)), "none twice, none left out"
    assert len(records) >= stop_at
