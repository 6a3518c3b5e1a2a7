"""The report of runs on a clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedfa.data import DataSet
from fedfa.experiment.recorded_runs import find_runs
from fedfa.experiment.run import run
from fedfa.report.html.clock_figures import clock_figures, reaching_table
from fedfa.report.html.grouping import Chapter, chapters_of
from fedfa.report.html.palette import Style
from fedfa.report.html.write import Reporter
from tests.experiment.run_toys import small

FLEET = {"devices": "lognormal", "availability": "daily", "session": 60.0, "speed": 2.0, "available": 0.5}


@pytest.fixture(scope="module")
def runs(blobs: DataSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    policies = {
        "wait": {}, "deadline": {"policy": "deadline", "deadline": 30.0},
        "fedbuff": {"policy": "fedbuff", "buffer": 2, "concurrency": 3},
    }  # fmt: skip
    engine = {"workers": 1, "execution": "each"}
    for name, policy in policies.items():
        run(small("fedavg", fleet={**FLEET, **policy}, cohort={"clients": 2}, engine=engine), place / name, data=blobs)
    run(small("fedavg", engine=engine), place / "off", data=blobs)
    return place


def chapter(runs: Path) -> Chapter:
    (found,) = chapters_of(find_runs([runs]).runs)
    return found


def test_the_page_has_the_section(runs: Path, tmp_path: Path) -> None:
    page = Reporter([runs], tmp_path / "page.html", figures=False).write().page.read_text()
    assert "On the clock" in page
    assert "Staleness of contributions" in page
    assert "The first visits of fedbuff" in page
    assert "cannot be shown" not in page


def test_runs_without_a_clock_have_none_of_it(runs: Path, tmp_path: Path) -> None:
    page = Reporter([runs / "off"], tmp_path / "page.html", figures=False).write().page.read_text()
    assert "On the clock" not in page


def test_times_to_an_accuracy_are_those_of_the_records(runs: Path) -> None:
    """By hand from the lines of metrics.jsonl: the first evaluation of at least 25 %."""
    table = reaching_table(chapter(runs), [25])
    assert table is not None
    assert [row[0] for row in table.rows] == ["deadline", "fedbuff", "wait"]
    for name, hours, megabytes, used in table.rows:
        total = 0.0
        records = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        shares = [record["utilisation"] for record in records if record["utilisation"] is not None]
        assert float(used) == pytest.approx(100 * sum(shares) / len(shares), rel=0.01)
        for record in records:
            total += (record["bytes_up"] + record["bytes_down"]) / 1e6
            if record["accuracy"] >= 0.25:
                assert float(hours) == pytest.approx(record["time"] / 3600, rel=0.01)
                assert float(megabytes) == pytest.approx(total, rel=0.01)
                break
        else:
            assert hours == "–"


def test_staleness_is_a_distribution(runs: Path) -> None:
    one = chapter(runs)
    figures = {figure.name: figure for figure in clock_figures(one, {m.name: Style("s0") for m in one.methods})}
    table = figures["staleness"].table
    assert table is not None
    assert sum(float(row[1]) for row in table.rows if row[1]) == pytest.approx(100, abs=0.1)
    assert {"accuracy-by-virtual-time", "timeline-wait", "timeline-fedbuff"} <= figures.keys()
