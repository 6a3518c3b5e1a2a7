"""The report of a tuning: its trials as parallel coordinates, the importance of its parameters, no run left waiting."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import optuna
import pytest

from fedfa.data import DataSet
from fedfa.experiment.run import run
from fedfa.experiment.tuning import TrialResult, importance
from fedfa.report.html.write import Report, Reporter
from tests.experiment.run_toys import small
from tests.report.browser import Browser, overflowing

PARAMETERS: list[dict[str, Any]] = [
    {"key": "local.lr", "low": 0.001, "high": 0.3, "log": True, "choices": []},
    {"key": "local.epochs", "low": 1, "high": 4, "log": False, "choices": []},
    {"key": "model.name", "low": 0.0, "high": 0.0, "log": False, "choices": ["mlp", "logistic"]},
]


def trial(number: int, lr: float, rungs: dict[str, float], rounds: int, **more: Any) -> dict[str, Any]:
    values = {"local.lr": lr, "local.epochs": 1 + number % 4, "model.name": "mlp"}
    scores = [rungs[str(rounds)]] if rungs else []
    return {"trial": number, "values": values, "rounds": rounds, "scores": scores, "by_rung": rungs, **more}


TRIALS = [
    trial(2, 0.1, {"1": 0.4, "3": 0.7}, 3),
    trial(1, 0.01, {"1": 0.3}, 1),
    trial(3, 0.3, {}, 1, failed="the training diverged <at once>"),
]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, blobs: DataSet) -> Path:
    """What a tuning leaves: a trial that was left behind after its first round, and the list of all."""
    out = tmp_path_factory.mktemp("tuned")
    run(small("fedavg", rounds=3), out / "trials" / "0001-s1", data=blobs, until=1)
    record = {
        "algorithm": "fedavg", "monitor": "accuracy", "lower_is_better": False, "validation": "clients:0.2",
        "seeds": [1], "rungs": [1, 3], "parameters": PARAMETERS,
        "importance": {"local.lr": 0.8, "local.epochs": 0.15, "model.name": 0.05}, "trials": TRIALS,
    }  # fmt: skip
    (out / "trials.json").write_text(json.dumps(record))
    return out


def written(tuned: Path, page: Path) -> Report:
    return Reporter([tuned], page, figures=False).write()


def test_the_section_shows_every_trial_and_the_importance(tuned: Path, tmp_path: Path) -> None:
    report = written(tuned, tmp_path / "page.html")
    text = report.page.read_text()
    assert report.problems == ()
    assert re.findall(r"<h3>(.*?)</h3>", text)[0] == "Tuning"
    figure = text[text.index('id="trials"') : text.index("</figure>")]
    assert "The best of 3: local.lr 0.1, local.epochs 3, model.name mlp; accuracy 0.7." in figure
    assert "the training diverged &lt;at once&gt;" in figure
    wide = figure[figure.index('class="drawing wide"') : figure.index('class="drawing narrow"')]
    lines = re.findall(r'<path d="([^"]*)" fill="none"[^>]*stroke:var\(--(\w+)\);stroke-width:(\S+?)[;"]', wide)
    corners = {(colour, width): d.count("L") + 1 for d, colour, width in lines}
    assert corners["s0", "2.6"] == 5, "the best has all three values and both rungs"
    assert corners["muted", "1.2"] == 3, "the failed one has values only"
    assert [d.count("L") + 1 for d, colour, width in lines if width == "1.4"] == [4], "the other was left behind"
    for share in ("80 %", "15 %", "5 %"):
        assert share in text[text.index('id="importance"') :]


def test_axes_place_values_where_they_belong(tuned: Path, tmp_path: Path) -> None:
    """On the logarithmic axis 0.01 and 0.1 lie 1 and 2 decades above 0.001; more rounds, more accuracy, higher up."""
    text = written(tuned, tmp_path / "page.html").page.read_text()
    figure = text[text.index('id="trials"') : text.index("</figure>")]
    wide = figure[figure.index('class="drawing wide"') : figure.index('class="drawing narrow"')]

    def points(style: str) -> list[tuple[float, float]]:
        (d,) = re.findall(rf'<path d="M([^"]*)" fill="none"[^>]*stroke-width:{style}[;"]', wide)
        return [(float(x), float(y)) for x, y in (pair.split() for pair in d.split("L"))]

    best, left = points("2.6"), points("1.4")
    assert (left[0][1] - best[0][1]) / 300 == pytest.approx(1 / (2 + 0.4771), abs=1e-3)
    assert best[4][1] < best[3][1] < left[3][1]
    assert best[0][0] < best[1][0] < best[2][0] < best[3][0] < best[4][0]


def test_trials_that_were_left_behind_are_not_waited_for(tuned: Path, tmp_path: Path) -> None:
    report = written(tuned, tmp_path / "page.html")
    text = report.page.read_text()
    assert report.unfinished == 0
    assert "Not finished" not in text
    assert "does not update itself" not in text
    assert Reporter([tuned], tmp_path / "watched.html", figures=False).watch(1, lambda _: None).unfinished == 0
    (tuned / "trials.json").rename(tuned / "later.json")
    try:
        assert written(tuned, tmp_path / "page.html").unfinished == 1, "a tuning that goes on is waited for"
    finally:
        (tuned / "later.json").rename(tuned / "trials.json")


def test_a_damaged_list_is_a_note(tuned: Path, tmp_path: Path) -> None:
    whole = (tuned / "trials.json").read_text()
    for damaged in (whole[:50], "{}"):
        (tuned / "trials.json").write_text(damaged)
        try:
            (problem,) = written(tuned, tmp_path / "page.html").problems
        finally:
            (tuned / "trials.json").write_text(whole)
        assert "uning cannot be shown" in problem.message


def test_importance_finds_the_parameter_that_matters() -> None:
    """Scores that depend on one of two parameters alone; those of a later rung do not count."""
    study = optuna.create_study()
    results = []
    for number in range(12):
        drawn = study.ask({"a": optuna.distributions.FloatDistribution(0, 1), "b": _UNIT})
        results.append(TrialResult(number, drawn.params, 1, (0.5,), by_rung={1: drawn.params["a"], 3: 0.0}))
    found = importance(study, results, 1)
    assert found["a"] > 0.7
    assert sum(found.values()) == pytest.approx(1)
    assert importance(study, results[:3], 1) == {}
    assert importance(study, results, 3) == {}, "equal scores say nothing"


_UNIT = optuna.distributions.FloatDistribution(0, 1)


@pytest.mark.system
@pytest.mark.parametrize("width", [400, 1400])
def test_the_section_fits_on_the_page(browser: Browser, tuned: Path, tmp_path: Path, width: int) -> None:
    page = written(tuned, tmp_path / "page.html").page
    browser.window(width)
    browser.open(page)
    assert browser.complaints() == []
    assert overflowing(browser) == []
