"""Study tables: our numbers beside the paper's."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from fedfa.paper.declarations import Published, study
from fedfa.paper.run_index import RunIndex
from fedfa.paper.tables import TableCell, as_csv, as_latex, as_markdown, study_table
from fedfa.seed_means import SeedMean
from fedfa.text_tables import latex_text
from tests.paper.small_study import place, pretend_run

STUDY = study("label-skew")


@pytest.fixture
def runs(tmp_path: Path) -> RunIndex:
    """FedFA at #C = 2 with three seeds of 200 rounds and one of 50; FedAvg with one; FedFA's text with one."""
    fedfa, fedavg = place(STUDY, "fmnist/c2", "fedfa"), place(STUDY, "fmnist/c2", "fedavg")
    for seed, accuracy in ((1, 0.83), (2, 0.84), (3, 0.865)):
        pretend_run(tmp_path / f"fedfa{seed}", fedfa.config(200, seed), accuracy)
    pretend_run(tmp_path / "short", fedfa.config(50, 1), 0.10)
    pretend_run(tmp_path / "fedavg", fedavg.config(200, 1), 0.60)
    pretend_run(tmp_path / "text", place(STUDY, "fmnist/c2", "fedfa", "paper").config(200, 1), 0.7635)
    pretend_run(tmp_path / "again", fedfa.config(200, 1), 0.20)
    return RunIndex.below([tmp_path / "fedfa1", tmp_path])


def test_table_cell_is_mean_and_standard_deviation_over_seeds_of_one_length(runs: RunIndex) -> None:
    """Of one seed that was run twice only the first counts, and the run of 50 rounds is in no mean of 200."""
    table = study_table(STUDY, runs)
    row = next(r for r in table.rows if (r.row.name, r.reading, r.rounds) == ("fedfa", "authors", 200))
    cell = row.cells["fmnist/c2"]
    assert cell is not None
    assert cell.ours is not None
    assert cell.ours.mean == pytest.approx((83 + 84 + 86.5) / 3)
    assert cell.ours.deviation == pytest.approx(statistics.stdev([83, 84, 86.5]))
    assert cell.ours_text == "84.50(1.80) [3]"
    short = next(r for r in table.rows if r.rounds == 50)
    assert short.cells["fmnist/c2"] == TableCell(SeedMean(10.0, None, (1,)), None), "no number of the paper beside it"


def test_table_shows_the_mean_of_the_last_ten_on_request(tmp_path: Path) -> None:
    fedfa = place(STUDY, "fmnist/c2", "fedfa")
    pretend_run(tmp_path / "one", fedfa.config(200, 1), 0.83)
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    (tmp_path / "one" / "summary.json").write_text(json.dumps({**summary, "last10_accuracy": 0.7723}))
    text = as_markdown(study_table(STUDY, RunIndex.below([tmp_path]), "last10"))
    assert "| FedFA | 77.23 [1] ▼ | 84.08(1.22) |" in text
    assert "mean of the last ten evaluations" in text
    assert "83.00" not in text


@pytest.mark.parametrize(
    ("seeds", "width"), [(1, 4.302653 * 1.22 * (4 / 3) ** 0.5), (3, 4.302653 * 1.22 * (2 / 3) ** 0.5)]
)
def test_table_marks_differences_beyond_students_t(seeds: int, width: float) -> None:
    """t₂ = 4.302653 for the paper's three trials, both means uncertain: ± 6.06 for one seed, ± 4.29 for three."""
    for away, mark in ((0.0, ""), (width - 1e-3, ""), (width + 1e-3, "▲"), (-width + 1e-3, ""), (-width - 1e-3, "▼")):
        ours = SeedMean(84.08 + away, None, tuple(range(seeds)))
        assert TableCell(ours, Published(84.08, 1.22)).mark == mark


@pytest.mark.parametrize("seeds", [1, 2, 3, 10])
def test_table_marks_about_one_equal_cell_of_twenty(seeds: int) -> None:
    """By simulation: the paper's three trials and our seeds from one normal distribution."""
    rng = np.random.default_rng(seeds)
    trials, ours = rng.normal(80, 1.5, (4000, 3)), rng.normal(80, 1.5, (4000, seeds)).mean(1)
    cells = [
        TableCell(
            SeedMean(float(mean), None, tuple(range(seeds))), Published(float(three.mean()), float(three.std(ddof=1)))
        )
        for mean, three in zip(ours, trials, strict=True)
    ]
    share = sum(cell.mark != "" for cell in cells) / len(cells)
    assert 0.04 <= share <= 0.06


def test_table_marks_nothing_without_a_deviation() -> None:
    assert TableCell(SeedMean(10.0, None, (1,)), Published(73.19)).mark == ""
    assert TableCell(SeedMean(10.0, None, (1,)), None).mark == ""


def test_markdown_table_shows_seeds_marks_readings_and_lengths(runs: RunIndex) -> None:
    text = as_markdown(study_table(STUDY, runs))
    assert "| FedFA | 84.50(1.80) [3] | 84.08(1.22) | – | 83.42(1.14) |" in text
    assert "| FedAvg | 60.00 [1] ▼ | 74.60(1.42) |" in text
    assert "| FedFA · text | 76.35 [1] ▼ | 84.08(1.22) | – | – |" in text
    assert "**FMNIST, only 50 of the paper's 200 rounds**" in text
    assert "| FedFA | 10.00 [1] | – | – | – |" in text
    assert "standard deviation" in text
    cifar = text.partition("**CIFAR-10**")[2]
    assert "text" not in cifar.partition("Ours:")[0], "a reading is shown only where it was run"


def test_csv_table_has_a_line_per_number(runs: RunIndex) -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(study_table(STUDY, runs)))))
    by_cell = {(line["cell"], line["reading"], line["rounds"]): line for line in lines}
    fedfa = by_cell["fmnist/c2/fedfa", "authors", "200"]
    assert (fedfa["seeds"], fedfa["ours mean"], fedfa["paper mean"]) == ("1 2 3", "84.5000", "84.08")
    assert by_cell["fmnist/c2/fedavg", "authors", "200"]["differs"] == "below"
    assert by_cell["fmnist/c2/fedfa", "authors", "50"]["paper mean"] == ""
    assert len([line for line in lines if line["reading"] == "authors" and line["rounds"] == "200"]) == 60


def test_latex_table_is_balanced_and_escaped(runs: RunIndex) -> None:
    text = as_latex(study_table(STUDY, runs))
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 4
    assert r"\#C = 2" in text
    assert r"$\alpha$ = 0.1" in text
    assert r"$\blacktriangledown$" in text
    for block in text.split(r"\begin{tabular}{@{}l")[1:]:
        width = len(block.partition("@")[0]) + 1
        rows = [line for line in block.splitlines() if line.endswith(r"\\")]
        assert rows
        assert {line.count("&") - line.count(r"\&") for line in rows} == {width - 1}


def test_latex_text_escapes_special_characters() -> None:
    assert latex_text("50 % & a_b {x}\\") == r"50 \% \& a\_b \{x\}\textbackslash{}"


def test_table_without_runs_shows_the_papers_numbers() -> None:
    text = as_markdown(study_table(STUDY, RunIndex.below([])))
    assert "| FedFA | – | 84.08(1.22) |" in text
    assert "▲ and ▼" in text
