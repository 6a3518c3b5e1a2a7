"""Figures from run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedfa.errors import RunError
from fedfa.insight.records import shown_rounds
from fedfa.paper.declare import Study
from fedfa.paper.declare import study as published_study
from fedfa.paper.figures import Shown, accuracy_by_round, draw_figure, inside_by_round, pair_shares
from fedfa.paper.found import Found, Runs
from fedfa.paper.inside import inside_tables
from fedfa.studies.files import write_lines
from fedfa.studies.run import run
from tests.paper.small_study import DECLARED, place, pretend_run, small_study

MEASURED = "insight.every = 1\ninsight.samples = 50\ninsight.features = [-1]\n"


def figure_study(draw: str, settings: str = MEASURED) -> Study:
    """The small study as a figure."""
    text = DECLARED.replace('kind = "table"', 'kind = "figure"')
    return small_study(text.replace("[settings]", f'[picture]\ndraw = "{draw}"\n\n[settings]\n{settings}', 1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Runs:
    """FedAvg and FedFA, two rounds that were looked into; FedFA with two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    study = figure_study("inside", f"{MEASURED}data.dir = '{data_dir}'\n")
    for row, seed in (("fedavg", 1), ("fedfa", 1), ("fedfa", 2)):
        run(place(study, "digits/c2", row).settings(2, seed), folder / f"{row}{seed}")
    return Runs.below([folder])


@pytest.mark.parametrize("draw", ["curves", "lines", "inside", "histograms"])
def test_every_kind_of_figure_is_drawn_twice_the_same(draw: str, runs: Runs, tmp_path: Path) -> None:
    shown = Shown.of(figure_study(draw), runs, "authors", 2)
    paths = [tmp_path / "one.svg", tmp_path / "one.png"]
    draw_figure(shown, paths)
    draw_figure(shown, [tmp_path / "two.svg"])
    text = paths[0].read_text(encoding="utf-8")
    assert text == (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert "only 2 of 4 rounds" in text.replace("<!-- ", "").replace(" -->", ""), "matplotlib writes texts as comments"
    assert "digits/c2/no-calibration" in shown.missing()


def test_nothing_to_draw_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="first: fedfa paper run small --rounds 3"):
        Shown.of(figure_study("curves"), Runs.below([tmp_path]), "authors", 3)


def test_curves_are_means_over_seeds_where_all_were_evaluated(tmp_path: Path) -> None:
    found = []
    for seed, accuracies in ((1, [0.5, None, 0.7]), (2, [0.7, 0.6, 0.9])):
        folder = tmp_path / str(seed)
        folder.mkdir()
        lines = [json.dumps({"round": n, "accuracy": a}) + "\n" for n, a in enumerate(accuracies, 1)]
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        found.append(Found(folder, 3, seed, {}))
    rounds, mean, spread = accuracy_by_round(found)
    assert rounds == [1, 3]
    assert mean == pytest.approx([60.0, 80.0])
    assert spread == pytest.approx([200**0.5, 200**0.5]), "standard deviation of 50 and 70: √(2 · 10²/1)"


def test_probes_are_read_from_the_records(runs: Runs) -> None:
    study = figure_study("inside")
    found = runs.finished(place(study, "digits/c2", "fedfa"), 2)
    rounds, mean, spread = inside_by_round(found, ("classifier_cosine", "mean"))
    assert rounds == [1, 2]
    assert all(-1 <= value <= 1 for value in mean)
    assert any(spread), "two seeds differ"
    edges, positive, negative = pair_shares(found)
    assert len(edges) == len(positive) + 1
    assert sum(positive) == pytest.approx(100)
    assert sum(negative) == pytest.approx(100)


def test_what_was_seen_stands_in_a_table(tmp_path: Path) -> None:
    """After the first round and after the last; two digits below ten, no minus before a zero."""
    study = figure_study("inside")
    here = place(study, "digits/c2", "fedavg")
    seen: dict[str, dict[str, list[float | None]]] = {
        "classifier_cosine": {"mean": [0.5, 0.25], "whole": [-0.126, -0.001]}, "drift": {"agreement": [1.0, 0.1]},
        "feature_distance": {"all": [12.34, 9.876], "relative": [None, 1.5], "mean_relative": [None, None]},
        "gradient": {"global": [0.0, 2.0]},
    }  # fmt: skip
    folder = pretend_run(tmp_path / "run", here.settings(4, 1), 0.5)
    probed = [
        {"round": number, **{part: {name: pair[at] for name, pair in values.items()} for part, values in seen.items()}}
        for at, number in enumerate((1, 4))
    ]
    evaluated = [{"round": number, "accuracy": value} for number, value in ((1, 0.2), (2, None), (4, 0.51234))]
    write_lines(folder / "insight.jsonl", probed)
    write_lines(folder / "metrics.jsonl", evaluated)
    ((column, header, rows),) = inside_tables(Shown.of(study, Runs.below([tmp_path]), "authors"))
    assert (column.name, header) == ("digits/c2", ["after round 1 → 4", "FedAvg"])
    assert [row[1] for row in rows] == [
        "0.50 → 0.25", "−0.13 → 0.00", "1.00 → 0.10", "12.3 → 9.88", "– → 1.50", "–", "0.00 → 2.00", "20.0 → 51.2",
    ]  # fmt: skip


def test_committed_runs_that_were_looked_into_can_be_drawn_whole() -> None:
    """Their features are too large to be kept, but where these lie in the plane is."""
    committed = Runs.below([Path(__file__).parents[2] / "results"])
    shown = Shown.of(published_study("features-and-classifiers"), committed, "authors")
    found = [run for runs in shown.runs.values() for run in runs]
    assert len(found) >= 3
    assert all(shown_rounds(run.folder) == [15] for run in found)


def test_a_run_without_its_probes_is_named(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no insight\.jsonl"):
        inside_by_round([Found(tmp_path, 2, 1, {})], ("classifier_cosine", "mean"))
    with pytest.raises(RunError, match=r"has no insight\.jsonl"):
        pair_shares([Found(tmp_path, 2, 1, {})])
