"""Figures from run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedfa.errors import RunError
from fedfa.paper.declare import Study
from fedfa.paper.figures import Shown, accuracy_by_round, draw_figure, inside_by_round, pair_shares
from fedfa.paper.found import Found, Runs
from fedfa.studies.run import run
from tests.paper.small_study import DECLARED, place, small_study


def figure_study(draw: str, settings: str = "") -> Study:
    """The small study as a figure."""
    text = DECLARED.replace('kind = "table"', 'kind = "figure"')
    return small_study(text.replace("[settings]", f'[picture]\ndraw = "{draw}"\n\n[settings]\n{settings}', 1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Runs:
    """FedAvg and FedFA, two rounds that were looked into; FedFA with two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    measured = "insight.every = 1\ninsight.samples = 50\ninsight.features = [-1]\n"
    study = figure_study("inside", f"{measured}data.dir = '{data_dir}'\n")
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


def test_a_run_without_its_probes_is_named(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no insight\.jsonl"):
        inside_by_round([Found(tmp_path, 2, 1, {})], ("classifier_cosine", "mean"))
    with pytest.raises(RunError, match=r"has no insight\.jsonl"):
        pair_shares([Found(tmp_path, 2, 1, {})])
