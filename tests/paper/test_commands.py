"""The command ``fedfa paper``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedfa.cli.app import app
from fedfa.cli.paper import _with_data, parse_duration
from fedfa.errors import ConfigError, DataError, RunError
from fedfa.experiment.config import Config
from fedfa.paper.declarations import study
from fedfa.paper.plan import missing
from fedfa.paper.run_index import RunIndex
from tests.paper.small_study import place, pretend_run, small_study

COMMITTED = str(Path(__file__).parents[2] / "results")
WIDE = {"COLUMNS": "200"}


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["paper", *arguments], env=WIDE, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_paper_list_shows_studies_and_cells() -> None:
    output = invoke("list", "--results", COMMITTED)
    for name in ("label-skew", "lambda-and-initialisation", "similarity-histograms"):
        assert name in output
    output = invoke("list", "label-skew", "--results", COMMITTED)
    lines = [line.split() for line in output.splitlines()]
    assert ["fmnist/c2/fedfa", "paper", "1"] in lines
    assert any(
        line[:3] == ["fmnist/dir0.1/fedfa", "authors", "–"] or line[:2] == ["fmnist/dir0.1/fedfa", "authors"]
        for line in lines
    )
    assert "50 rounds: 1, 2" in output


def test_paper_table_prints_every_format(tmp_path: Path) -> None:
    declared = study("ablation")
    pretend_run(tmp_path / "run", place(declared, "fmnist/c2", "no-calibration").config(200, 1), 0.5)
    for form, expected in (
        ("terminal", "50.00 [1] ▼"), ("markdown", "| 50.00 [1] ▼ | 78.07(2.23) |"),
        ("latex", r"50.00 [1] $\blacktriangledown$ & 78.07(2.23)"),
        ("csv", "ablation,fmnist/c2/no-calibration,authors,200"),
    ):  # fmt: skip
        assert expected in invoke("table", "ablation", "--results", str(tmp_path), "--format", form)
    with pytest.raises(ConfigError, match="did you mean 'markdown'"):
        invoke("table", "ablation", "--format", "markdwon")


def test_paper_run_plan_lists_missing_cells_only(tmp_path: Path) -> None:
    output = invoke(
        "run", "ablation", "--cells", "fmnist/*", "--seeds", "1,99", "--plan", "--results", COMMITTED,
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert "fmnist/c2/no-anchor-update seed 99" in output
    assert "fmnist/c2/fedfa seed 1 " not in output  # committed
    assert not (tmp_path / "out").exists()


def test_paper_run_does_nothing_if_nothing_is_missing(tmp_path: Path) -> None:
    declared = study("ablation")
    pretend_run(tmp_path / "run", place(declared, "fmnist/c2", "fedfa").config(200, 1), 0.5)
    output = invoke(
        "run",
        "ablation",
        "--cells",
        "fmnist/c2/fedfa",
        "--seeds",
        "1",
        "--results",
        str(tmp_path),
        "--out",
        str(tmp_path / "o"),
    )
    assert "nothing is missing" in output


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("0.5h", 1800)]
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "2h ago", "two hours", "-1h"])
def test_parse_duration_rejects_other_text(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 2h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "label-skew", "--seeds", "1;2"], "whole numbers from 0, separated by commas"),
        (["run", "label-skew", "--reading", "author"], "did you mean 'authors'"),
        (["run", "lable-skew"], "did you mean 'label-skew'"),
        (["run", "label-skew", "--plan", "--rounds", "201"], "more than the paper's 200"),
        (["run", "label-skew", "--plan", "--budget", "2x"], "such as 2h"),
        (["run", "label-skew", "--plan", "--cells", "fmnist/c3/*"], "`fedfa paper list label-skew` shows all"),
        (["table", "label-skew", "--results", "nowhere"], "nowhere: no such directory"),
        (["figure", "label-skew"], "is a table: fedfa paper table label-skew"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        invoke(*arguments)


def test_table_without_runs_and_numbers_names_the_command_to_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="first: fedfa paper run batch-size"):
        invoke("table", "batch-size", "--results", str(tmp_path))


def test_paper_table_of_a_study_with_diagnostics_shows_them() -> None:
    output = invoke("table", "features-and-classifiers", "--results", COMMITTED)
    assert "after round 1 → 15" in output
    assert "gradient of the loss" in output


def test_cells_without_data_are_reported_and_the_others_remain(
    tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = small_study()
    cells = missing(declared, RunIndex.below([]), tmp_path, patterns=["digits/c2/fed*"], seeds=[1], reading="authors")
    nowhere = {"data": {"name": "cifar100", "dir": str(tmp_path / "nothing"), "offline": True}}
    here = {"data": {"dir": str(data_dir), "offline": True}}
    lacking = replace(cells[0], config=Config.resolve(cells[0].config.to_dict(), nowhere))
    having = replace(cells[1], config=Config.resolve(cells[1].config.to_dict(), here))
    assert _with_data([lacking, having]) == [having]
    assert "1 runs are left out" in capsys.readouterr().err
    with pytest.raises(DataError, match="cifar100"):
        _with_data([lacking])
