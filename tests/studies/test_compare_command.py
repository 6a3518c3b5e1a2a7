"""`fedfa compare` on finished runs: the table, and the differences on the same seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedfa.cli.app import app
from fedfa.errors import FedfaError
from fedfa.report.paired_differences import paired_rows, scores_of
from fedfa.studies.compare import plan_cells
from fedfa.studies.run import run
from fedfa.studies.settings import preset_layer

ROUNDS = {"rounds": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """FedAvg and FedFA with two seeds each, as compare would leave them."""
    out = tmp_path_factory.mktemp("compare")
    layers = [preset_layer("digits-c2"), {**ROUNDS, "data": {"dir": str(data_dir)}}]
    for cell in plan_cells(["fedavg", "fedfa"], [1, 2], layers, out):
        run(cell.settings, cell.folder)
    return out


def compare(out: Path, data_dir: Path, *more: str) -> str:
    arguments = ["compare", "--preset", "digits-c2", "--rounds", "2", "--seed", "1", "--seed", "2", "--out", str(out)]
    methods = ["--algorithm", "fedavg", "--algorithm", "fedfa", "--data-dir", str(data_dir)]
    result = CliRunner().invoke(app, [*arguments, *methods, *more], env={"COLUMNS": "200"}, catch_exceptions=False)
    return result.output


def test_differences_on_the_same_seeds_stand_below_the_table(finished: Path, data_dir: Path) -> None:
    said = compare(finished, data_dir)
    by_method = {name: [finished / f"{name}-s1", finished / f"{name}-s2"] for name in ("fedavg", "fedfa")}
    [row] = paired_rows(scores_of(by_method))
    assert row[0] == "fedfa − fedavg"
    for cell in row:
        assert cell in said
    assert "exceeds seed noise?" in said
    page = (finished / "table.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(row)} |" in page
    assert page.count("| fedfa |") == 2


def test_a_damaged_run_is_left_out_of_the_table_and_told(finished: Path, data_dir: Path) -> None:
    summary = finished / "fedfa-s2" / "summary.json"
    whole = summary.read_text(encoding="utf-8")
    summary.write_text("{", encoding="utf-8")
    try:
        with pytest.raises(FedfaError, match=r"fedfa-s2: .*cannot be read"):
            compare(finished, data_dir)
        page = (finished / "table.md").read_text(encoding="utf-8")
        assert page.count("| fedfa |") == 1
        assert "unknown: one seed" in page, "only seed 1 is left of both"
    finally:
        summary.write_text(whole, encoding="utf-8")
