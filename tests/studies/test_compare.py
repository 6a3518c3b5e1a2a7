"""Comparisons: cells, processes, failures, going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedfa.errors import SettingsError
from fedfa.report.comparison_table import HEADER, comparison_rows, markdown_table
from fedfa.studies.compare import Cell, Comparison, plan_cells
from fedfa.studies.run import run

QUICK: dict[str, Any] = {
    "rounds": 2, "device": "cpu", "data": {"name": "digits", "clients": 10}, "model": {"name": "logistic"},
    "cohort": {"clients": 2}, "local": {"epochs": 1},
}  # fmt: skip


def quiet(cell: Cell, record: dict[str, Any]) -> None:
    pass


def test_cells_are_methods_times_seeds_under_equal_settings(tmp_path: Path) -> None:
    cells = plan_cells(["fedavg", "fedfa@authors", "fedfa+fedlc"], [1, 7], [QUICK, {"rounds": 3}], tmp_path)
    assert [cell.folder.name for cell in cells] == [
        "fedavg-s1", "fedavg-s7", "fedfa-authors-s1", "fedfa-authors-s7", "fedfa-fedlc-s1", "fedfa-fedlc-s7",
    ]  # fmt: skip
    assert {cell.settings.rounds for cell in cells} == {3}
    assert [cell.settings.seed for cell in cells] == [1, 7] * 3
    assert cells[2].settings.local.lr_decay == 0.99, "the variant's settings apply"
    assert cells[2].title == "fedfa@authors"


def test_the_same_cell_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"two runs would go to .*fedavg-s1"):
        plan_cells(["fedavg", "fedavg"], [1], [QUICK], tmp_path)


def test_runs_in_processes_are_those_of_this_process_and_a_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    """The logistic network has no normalisation layers: fedbn is refused, with its reason; the rest is there."""
    cells = plan_cells(["fedbn", "fedavg", "fedfa"], [1], [QUICK], tmp_path / "compare")
    seen: list[tuple[str, int]] = []
    work = Comparison(cells, 2, lambda cell, record: seen.append((cell.title, record["round"])))
    work.run()
    assert list(work.failed) == ["fedbn-s1"]
    assert "normalisation" in work.failed["fedbn-s1"]
    assert sorted(seen) == [("fedavg", 1), ("fedavg", 2), ("fedfa", 1), ("fedfa", 2)]
    here = run(cells[2].settings, tmp_path / "here")
    there = json.loads((cells[2].folder / "summary.json").read_text())
    assert there["final_accuracy"] == here.final_accuracy
    assert [cell.finished() for cell in cells] == [False, True, True]

    def never(cell: Cell, record: dict[str, Any]) -> None:
        raise AssertionError("a finished cell was run again")

    Comparison(cells[1:], 2, never).run()
    rows = comparison_rows([cell.folder for cell in cells])
    assert [row[0] for row in rows] == ["fedavg", "fedfa"]
    assert len(rows[0]) == len(HEADER)
    assert markdown_table(HEADER, rows).count("\n") == 3


def test_a_folder_with_another_run_is_not_written_over(tmp_path: Path) -> None:
    run(plan_cells(["fedavg"], [1], [QUICK], tmp_path)[0].settings, tmp_path / "fedavg-s1")
    before = (tmp_path / "fedavg-s1" / "metrics.jsonl").read_bytes()
    cells = plan_cells(["fedavg"], [1], [QUICK, {"local": {"lr": 0.5}}], tmp_path)
    assert not cells[0].finished()
    work = Comparison(cells, 1, quiet)
    work.run()
    assert "other settings" in work.failed["fedavg-s1"]
    assert (tmp_path / "fedavg-s1" / "metrics.jsonl").read_bytes() == before
