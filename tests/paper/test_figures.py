"""Figures and diagnostics tables of a study, from run directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedfa.diagnostics.records import DiagnosticsRecords
from fedfa.errors import RunError
from fedfa.experiment.files import write_lines
from fedfa.experiment.recorded_runs import RecordedRun, read_run
from fedfa.experiment.run import run
from fedfa.paper.declarations import Study
from fedfa.paper.declarations import study as published_study
from fedfa.paper.diagnostics_tables import diagnostics_tables
from fedfa.paper.figures import FigureRuns, accuracy_by_round, diagnostic_by_round, draw_figure, pair_shares
from fedfa.paper.run_index import RunIndex
from tests.paper.small_study import DECLARED, place, pretend_run, small_study

MEASURED = "diagnostics.every = 1\ndiagnostics.samples = 50\ndiagnostics.features = [-1]\n"


def figure_study(draw: str, config: str = MEASURED) -> Study:
    """The small study as a figure."""
    text = DECLARED.replace('kind = "table"', 'kind = "figure"')
    return small_study(text.replace("[config]", f'[picture]\ndraw = "{draw}"\n\n[config]\n{config}', 1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> RunIndex:
    """FedAvg and FedFA, two rounds with diagnostics; FedFA with two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    study = figure_study("diagnostics", f"{MEASURED}data.dir = '{data_dir}'\n")
    for row, seed in (("fedavg", 1), ("fedfa", 1), ("fedfa", 2)):
        run(place(study, "digits/c2", row).config(2, seed), folder / f"{row}{seed}")
    return RunIndex.below([folder])


@pytest.mark.parametrize("draw", ["curves", "lines", "diagnostics", "histograms"])
def test_every_kind_of_figure_is_reproducible(draw: str, runs: RunIndex, tmp_path: Path) -> None:
    shown = FigureRuns.of(figure_study(draw), runs, "authors", 2)
    paths = [tmp_path / "one.svg", tmp_path / "one.png"]
    draw_figure(shown, paths)
    draw_figure(shown, [tmp_path / "two.svg"])
    text = paths[0].read_text(encoding="utf-8")
    assert text == (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert "only 2 of 4 rounds" in text.replace("<!-- ", "").replace(" -->", ""), "matplotlib writes texts as comments"
    assert "digits/c2/no-calibration" in shown.missing()


def test_figure_without_runs_names_the_command_to_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="first: fedfa paper run small --rounds 3"):
        FigureRuns.of(figure_study("curves"), RunIndex.below([tmp_path]), "authors", 3)


def test_accuracy_by_round_is_the_mean_over_seeds_where_all_were_evaluated(tmp_path: Path) -> None:
    found = []
    for seed, accuracies in ((1, [0.5, None, 0.7]), (2, [0.7, 0.6, 0.9])):
        folder = tmp_path / str(seed)
        folder.mkdir()
        lines = [json.dumps({"round": n, "accuracy": a}) + "\n" for n, a in enumerate(accuracies, 1)]
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        (folder / "config.toml").write_text(f"seed = {seed}", encoding="utf-8")
        found.append(read_run(folder))
    rounds, mean, spread = accuracy_by_round(found)
    assert rounds == [1, 3]
    assert mean == pytest.approx([60.0, 80.0])
    assert spread == pytest.approx([200**0.5, 200**0.5]), "standard deviation of 50 and 70: √(2 · 10²/1)"


def test_diagnostics_are_read_from_the_records(runs: RunIndex) -> None:
    study = figure_study("diagnostics")
    found = runs.finished(place(study, "digits/c2", "fedfa"), 2)
    rounds, mean, spread = diagnostic_by_round(found, ("classifier_cosine", "mean"))
    assert rounds == [1, 2]
    assert all(-1 <= value <= 1 for value in mean)
    assert any(spread), "two seeds differ"
    edges, positive, negative = pair_shares(found)
    assert len(edges) == len(positive) + 1
    assert sum(positive) == pytest.approx(100)
    assert sum(negative) == pytest.approx(100)


def test_diagnostics_table_shows_first_and_last_round(tmp_path: Path) -> None:
    """After the first round and after the last; two digits below ten, no minus before a zero."""
    study = figure_study("diagnostics")
    here = place(study, "digits/c2", "fedavg")
    measured: dict[str, dict[str, list[float | None]]] = {
        "classifier_cosine": {"mean": [0.5, 0.25], "whole": [-0.126, -0.001]}, "drift": {"agreement": [1.0, 0.1]},
        "feature_distance": {"all": [12.34, 9.876], "relative": [None, 1.5], "mean_relative": [None, None]},
        "gradient": {"global": [0.0, 2.0]},
    }  # fmt: skip
    folder = pretend_run(tmp_path / "run", here.config(4, 1), 0.5)
    records = [
        {
            "round": number,
            **{component: {name: pair[at] for name, pair in values.items()} for component, values in measured.items()},
        }
        for at, number in enumerate((1, 4))
    ]
    evaluated = [{"round": number, "accuracy": value} for number, value in ((1, 0.2), (2, None), (4, 0.51234))]
    write_lines(folder / "diagnostics.jsonl", records)
    write_lines(folder / "metrics.jsonl", evaluated)
    ((column, header, rows),) = diagnostics_tables(FigureRuns.of(study, RunIndex.below([tmp_path]), "authors"))
    assert (column.name, header) == ("digits/c2", ["after round 1 → 4", "FedAvg"])
    assert [row[1] for row in rows] == [
        "0.50 → 0.25", "−0.13 → 0.00", "1.00 → 0.10", "12.3 → 9.88", "– → 1.50", "–", "0.00 → 2.00", "20.0 → 51.2",
    ]  # fmt: skip


def test_committed_runs_with_diagnostics_have_their_embeddings() -> None:
    """Their features are too large to commit; their t-SNE embeddings are committed."""
    committed = RunIndex.below([Path(__file__).parents[2] / "results"])
    shown = FigureRuns.of(published_study("features-and-classifiers"), committed, "authors")
    found = [run for runs in shown.runs.values() for run in runs]
    assert len(found) >= 3
    assert all(DiagnosticsRecords(run.path).shown_rounds() == [15] for run in found)


def test_run_without_diagnostics_is_named(runs: RunIndex, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no diagnostics\.jsonl"):
        diagnostic_by_round([RecordedRun(tmp_path, {})], ("classifier_cosine", "mean"))
    with pytest.raises(RunError, match=r"has no diagnostics\.jsonl"):
        pair_shares([RecordedRun(tmp_path, {})])
