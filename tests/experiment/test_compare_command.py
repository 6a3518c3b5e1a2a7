"""`fedfa compare` on finished runs: the tables, the differences on the same seeds, and what is missing."""

from __future__ import annotations

import csv
import io
import re
import shutil
import statistics
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedfa.algorithms import registry
from fedfa.cli.app import app
from fedfa.errors import ConfigError, FedfaError
from fedfa.experiment.config import preset_layer
from fedfa.experiment.run import run
from fedfa.experiment.run_directory import RunDirectory
from fedfa.experiment.sweep import Comparison, plan_cells
from fedfa.experiment.variations import parse_variation, plan_configs
from fedfa.report.paired_differences import paired_rows, scores_of

METHODS = ("fedavg", "fedfa")
LR = "local.lr=0.1,0.05"
FOLDERS = ("digits-c2,local.lr=0.1", "digits-c2,local.lr=0.05")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """FedAvg and FedFA with two seeds each, as compare would leave them."""
    return _run_all(tmp_path_factory.mktemp("compare"), data_dir)


@pytest.fixture(scope="module")
def two_settings(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """The same with two learning rates."""
    return _run_all(tmp_path_factory.mktemp("settings"), data_dir, LR)


def _run_all(out: Path, data_dir: Path, *variations: str) -> Path:
    common = {"rounds": 2, "data": {"dir": str(data_dir)}}
    bases = {"digits-c2": preset_layer("digits-c2")}
    for setting in plan_configs(bases, common, [parse_variation(text) for text in variations], out):
        for cell in plan_cells(METHODS, [1, 2], setting.layers, setting.directory):
            run(cell.config, cell.directory)
    return out


@pytest.fixture
def never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not finished cannot be run."""

    def start(self: Comparison, cell: object) -> None:
        raise AssertionError(f"{cell} was run")

    monkeypatch.setattr(Comparison, "_start", start)


def compare(out: Path, data_dir: Path, *more: str, methods: tuple[str, ...] = METHODS, rounds: int = 2) -> str:
    arguments = ["compare", "--rounds", str(rounds), "--out", str(out), "--data-dir", str(data_dir), *more]
    if "--preset" not in more:
        arguments += ["--preset", "digits-c2"]
    if "--seed" not in more:
        arguments += ["--seed", "1", "--seed", "2"]
    arguments += [word for method in methods for word in ("--algorithm", method)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def text_of(out: Path, ending: str = "md") -> str:
    return (out / f"table.{ending}").read_text(encoding="utf-8")


def accuracies(directory: Path, method: str) -> list[float]:
    summaries = [RunDirectory(directory / f"{method}-s{seed}").summary() for seed in (1, 2)]
    return [100 * summary["final_accuracy"] for summary in summaries if summary is not None]


def expected(directory: Path, method: str) -> str:
    values = accuracies(directory, method)
    return f"{statistics.fmean(values):.2f}({statistics.stdev(values):.2f}) [2]"


# -- the tables -------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("never_run")
def test_a_single_setting_has_its_runs_where_they_always_were(finished: Path, data_dir: Path) -> None:
    said = compare(finished, data_dir)
    assert sorted(path.name for path in finished.iterdir()) == [
        "fedavg-s1", "fedavg-s2", "fedfa-s1", "fedfa-s2", "table.csv", "table.md", "table.tex",
    ]  # fmt: skip
    page = text_of(finished)
    assert "| method | digits-c2 |" in page
    for method in METHODS:
        assert re.search(rf"^{method} +{re.escape(expected(finished, method))} *$", said, re.MULTILINE)
        assert f"| {method} | {expected(finished, method)} |" in page
        assert page.count(f"| {method} | 1 |") == page.count(f"| {method} | 2 |") == 1, "the runs stand below"
    assert "after the last of 2 rounds" in page
    assert "missing" not in page + said
    assert "table.tex" in said


@pytest.mark.usefixtures("never_run")
def test_differences_on_the_same_seeds_stand_below_the_table(finished: Path, data_dir: Path) -> None:
    said = compare(finished, data_dir)
    by_method = {name: [finished / f"{name}-s1", finished / f"{name}-s2"] for name in METHODS}
    [row] = paired_rows(scores_of(by_method))
    assert row[0] == "fedfa − fedavg"
    for cell in row:
        assert cell in said
    assert "exceeds seed noise?" in said
    assert f"| {' | '.join(row)} |" in text_of(finished)


@pytest.mark.usefixtures("never_run")
def test_several_settings_are_columns_in_every_format(two_settings: Path, data_dir: Path) -> None:
    said = compare(two_settings, data_dir, "--vary", LR)
    page, tex = text_of(two_settings), text_of(two_settings, "tex")
    assert "| method | local.lr=0.1 | local.lr=0.05 |" in page
    assert r"method & local.lr=0.1 & local.lr=0.05 \\" in tex
    for method in METHODS:
        cells = [method, *(expected(two_settings / name, method) for name in FOLDERS)]
        assert cells[1] != cells[2]
        assert f"| {' | '.join(cells)} |" in page
        assert f"{' & '.join(cells)} \\\\" in tex
        assert re.search(" +".join(map(re.escape, cells)), said)
    lines = list(csv.DictReader(io.StringIO(text_of(two_settings, "csv"))))
    assert [(line["setting"], line["method"]) for line in lines] == [
        (f"local.lr={lr}", method) for lr in ("0.1", "0.05") for method in METHODS
    ]
    values = accuracies(two_settings / FOLDERS[1], "fedfa")
    assert float(lines[3]["mean"]) == pytest.approx(statistics.fmean(values), abs=1e-4)
    assert float(lines[3]["std"]) == pytest.approx(statistics.stdev(values), abs=1e-4)
    assert (lines[3]["seeds"], lines[3]["rounds"], lines[3]["missing"]) == ("1 2", "2", "")


@pytest.mark.usefixtures("never_run")
def test_differences_are_of_one_setting_each(two_settings: Path, data_dir: Path) -> None:
    said = compare(two_settings, data_dir, "--vary", LR)
    rows = []
    for name in FOLDERS:
        [row] = paired_rows(scores_of({m: [two_settings / name / f"{m}-s{s}" for s in (1, 2)] for m in METHODS}))
        rows.append(f"| {' | '.join(row)} |")
    page = text_of(two_settings)
    assert rows[0] != rows[1]
    assert page.count("| fedfa − fedavg |") == said.count("fedfa − fedavg") == 2
    first, _, second = page.partition("**local.lr=0.1**")[2].partition("**local.lr=0.05**")
    assert rows[0] in first
    assert rows[1] in second
    assert page.count("Differences on the same seeds") == said.count("Differences on the same seeds") == 1


@pytest.mark.usefixtures("never_run")
def test_a_narrow_terminal_gets_the_columns_one_below_the_other(
    two_settings: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedfa.cli.app.console", Console(width=30))
    arguments = ["compare", "--preset", "digits-c2", "--vary", LR, "--rounds", "2", "--seed", "1", "--seed", "2"]
    arguments += ["--algorithm", "fedavg", "--out", str(two_settings), "--data-dir", str(data_dir)]
    said = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    for name in FOLDERS:
        assert re.search(rf"^fedavg {re.escape(expected(two_settings / name, 'fedavg'))} *$", said, re.MULTILINE)


# -- what is missing --------------------------------------------------------------------------------------------------
def test_a_damaged_run_is_named_in_every_table(finished: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    (out / "fedfa-s2" / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(FedfaError, match=r"fedfa-s2: .*summary\.json"):
        compare(out, data_dir)
    page = text_of(out)
    assert f"| fedfa | {accuracies(finished, 'fedfa')[0]:.2f} [1] |" in page
    assert re.search(r"^- fedfa: 1 of 2 seeds; missing: fedfa-s2 \(.*summary\.json.*\)$", page, re.MULTILINE)
    assert "unknown: one seed" in page, "only seed 1 is left of both"
    assert re.search(r"^% fedfa: 1 of 2 seeds; missing: fedfa-s2 \(", text_of(out, "tex"), re.MULTILINE)
    lines = list(csv.DictReader(io.StringIO(text_of(out, "csv"))))
    assert [line["seeds"] for line in lines] == ["1 2", "1"]
    assert lines[1]["missing"].startswith("fedfa-s2 (")


def test_a_run_without_its_rounds_is_missing_too(finished: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    (out / "fedavg-s1" / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(FedfaError, match=r"fedavg-s1: .*metrics\.jsonl was changed or cut"):
        compare(out, data_dir)
    assert "- fedavg: 1 of 2 seeds; missing: fedavg-s1 (" in text_of(out)


def test_a_run_of_another_process_is_missing_without_an_error(two_settings: Path, data_dir: Path) -> None:
    cell = two_settings / FOLDERS[1] / "fedfa-s1"
    summary = (cell / "summary.json").read_bytes()
    other = RunDirectory(cell)
    other.reopen()
    (cell / "summary.json").unlink()
    try:
        said = compare(two_settings, data_dir, "--vary", LR)
    finally:
        (cell / "summary.json").write_bytes(summary)
        other.close()
    note = "fedfa, local.lr=0.05: 1 of 2 seeds; missing: fedfa-s1 (another process is working on it)"
    assert note in said
    assert f"- {note}" in text_of(two_settings)
    assert f"skipped: {FOLDERS[1]}/fedfa-s1" in said
    assert expected(two_settings / FOLDERS[0], "fedfa") in said, "the same run of the other setting is there"


def test_without_a_complete_run_the_tables_stay_as_they_are(finished: Path, data_dir: Path) -> None:
    compare(finished, data_dir)
    before = {ending: text_of(finished, ending) for ending in ("md", "tex", "csv")}
    arguments = ["compare", "--preset", "digits-c2", "--rounds", "2", "--set", "local.lr=0.7", "--seed", "1"]
    arguments += ["--algorithm", "fedavg", "--out", str(finished), "--data-dir", str(data_dir)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert isinstance(result.exception, FedfaError)
    assert "fedavg-s1: " in str(result.exception)
    assert "another config" in str(result.exception)
    assert "No run is complete, so no table is made" in result.output
    assert "Also in" not in result.output
    assert {ending: text_of(finished, ending) for ending in before} == before


@pytest.mark.usefixtures("never_run")
def test_runs_are_found_again_when_a_single_setting_gets_company(
    finished: Path, two_settings: Path, data_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "grown"
    shutil.copytree(finished, out)  # the preset's learning rate is 0.1, the first of the two
    shutil.copytree(two_settings / FOLDERS[1], out / FOLDERS[1])
    said = compare(out, data_dir, "--vary", LR)
    for method in METHODS:
        assert (
            f"| {method} | {expected(finished, method)} | {expected(two_settings / FOLDERS[1], method)} |"
            in text_of(out)
        )
    assert "missing" not in said
    assert not (out / FOLDERS[0]).exists(), "they stay where they are"


@pytest.mark.usefixtures("never_run")
def test_runs_are_found_again_when_one_setting_is_left(finished: Path, data_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "digits-c2")
    compare(tmp_path, data_dir)
    assert all(f"| {method} | {expected(finished, method)} |" in text_of(tmp_path) for method in METHODS)


def test_a_run_elsewhere_counts_only_with_the_same_settings_and_if_there_is_none_in_its_place(
    finished: Path, data_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "fedavg-s2" / "config.toml").write_text("seed = ", encoding="utf-8")  # damaged
    shutil.copytree(finished / "fedfa-s1", tmp_path / "digits-c2" / "fedfa-s1")
    common = {"rounds": 2, "data": {"dir": str(data_dir)}}
    bases = {name: preset_layer(name) for name in ("digits-c2", "fmnist-c2")}
    found = [
        [cell.directory.relative_to(tmp_path).as_posix() for cell in plan_cells(
            METHODS, [1, 2], one.layers, one.directory, one.name, one.elsewhere
        )]
        for one in plan_configs(bases, common, [], tmp_path)
    ]  # fmt: skip
    assert found == [
        ["fedavg-s1", "digits-c2/fedavg-s2", "digits-c2/fedfa-s1", "fedfa-s2"],
        ["fmnist-c2/fedavg-s1", "fmnist-c2/fedavg-s2", "fmnist-c2/fedfa-s1", "fmnist-c2/fedfa-s2"],
    ]


# -- running ----------------------------------------------------------------------------------------------------------
def test_what_is_missing_of_a_setting_is_run_in_its_folder(two_settings: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(two_settings, out)
    shutil.rmtree(out / FOLDERS[1] / "fedavg-s2")
    said = compare(out, data_dir, "--vary", LR)
    assert f"{FOLDERS[1]}/fedavg-s2" in said
    assert accuracies(out / FOLDERS[1], "fedavg") == accuracies(two_settings / FOLDERS[1], "fedavg")
    assert expected(two_settings / FOLDERS[1], "fedavg") in said


@pytest.mark.system
def test_all_means_in_each_setting_the_methods_that_fit(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matched averaging has no rule for normalisation layers, and FedBN needs some."""
    known = registry.methods()
    monkeypatch.setattr(registry, "methods", lambda: {name: known[name] for name in ("fedbn", "matching")})
    networks = "model.name=mlp,cnn-mixed-digits"
    small = ["--set", "cohort.clients=1", "--set", "local.epochs=1", "--seed", "1"]
    said = compare(tmp_path, data_dir, "--vary", networks, *small, methods=("all",), rounds=1)
    assert "model.name=mlp: left out: fedbn (" in said
    page = text_of(tmp_path)
    assert re.search(r"^\| matching \| \d+\.\d\d \[1\] \| – \|$", page, re.MULTILINE)
    assert re.search(r"^\| fedbn † \| – \| \d+\.\d\d \[1\] \|$", page, re.MULTILINE), "clients' own models, marked"
    assert "† no global model" in page
    assert "- matching, model.name=cnn-mixed-digits: left out (" in page
    assert sorted(path.parent.name for path in tmp_path.glob("*/*/summary.json")) == ["fedbn-s1", "matching-s1"]


# -- what is refused --------------------------------------------------------------------------------------------------
def test_presets_are_settings_and_what_is_wrong_names_the_one(tmp_path: Path, data_dir: Path) -> None:
    """It is refused before anything is run."""
    two = ["--preset", "digits-c2", "--preset", "fmnist-c2", "--set", "data.name=digits", "--set", "data.offline=true"]
    with pytest.raises(ConfigError, match=r"^digits-c2: .*no component 'moon'"):
        compare(tmp_path, data_dir, *two, "--set", "algorithm.moon.mu=1", methods=("fedavg",))
    assert list(tmp_path.iterdir()) == []


def test_what_would_be_lost_silently_is_refused(tmp_path: Path, data_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"--set local\.lr is given twice"):
        compare(tmp_path, data_dir, "--set", "local.lr=0.5", "--set", "local.lr=0.1")
    with pytest.raises(ConfigError, match=r"--vary rounds, but it is set for all settings already"):
        compare(tmp_path, data_dir, "--vary", "rounds=1,2")
    twice = ["compare", "--preset", "digits-c2", "--preset", "digits-c2", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, twice, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "--preset digits-c2 is given twice" in result.output
    assert list(tmp_path.iterdir()) == []
